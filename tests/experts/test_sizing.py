"""What is planned before loading."""

import pytest
import torch

from greenroom.config import OffloadConfig, parse_size
from greenroom.errors import ConfigError, MemoryLimitError
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.sizing import RESERVED_BYTES, explain_misfit, lay_out, plan_memory

FMT = ExpertFormat(2048, 768, torch.bfloat16, Activation(ActivationKind.SILU))
LAYERS, EXPERTS, GIB = 4, 128, 2**30
MODEL = LAYERS * EXPERTS * FMT.block_bytes


def plan(device_free=80 * GIB, host_free=100 * GIB, other=GIB, **knobs):
    return plan_memory(OffloadConfig(**knobs), [FMT] * LAYERS, [EXPERTS] * LAYERS, other, device_free, host_free)


def test_kv_blocks_in_host_memory_are_planned_too():
    layers = [FMT] * LAYERS, [EXPERTS] * LAYERS
    store = LAYERS * EXPERTS * FMT.block_bytes
    for kv, fits in ((GIB, True), (GIB + 1, False)):
        plan = lay_out(OffloadConfig(cache_expert_num=1), *layers, 0, 80 * GIB, kv_offload_bytes=kv)
        assert plan.host_bytes == store
        assert (explain_misfit(plan, 80 * GIB, store + GIB) is None) == fits
    assert "KV blocks 1.00 GiB and" in explain_misfit(plan, 80 * GIB, store + GIB)
    assert "give --kv-offload less" in explain_misfit(plan, 80 * GIB, store + GIB)


def test_slots_as_asked_for():
    assert plan(cache_expert_num=5).num_slots == (5,) * LAYERS
    assert plan(cache_expert_num=500).num_slots == (EXPERTS,) * LAYERS
    assert plan(cache_expert_num=0).cache_bytes == 0


def test_vram_holds_slots_and_miss_buffers():
    buffers = 3 * 16 * FMT.block_bytes
    assert plan(vram=buffers).num_slots == (0,) * LAYERS
    result = plan(vram=buffers + 7 * LAYERS * FMT.block_bytes + 5)
    assert result.num_slots == (7,) * LAYERS
    assert result.cache_bytes + result.buffer_bytes <= buffers + 7 * LAYERS * FMT.block_bytes + 5
    with pytest.raises(MemoryLimitError, match="does not hold the miss buffers"):
        plan(vram=buffers - 1)


def test_by_default_a_gpu_keeps_room_for_the_kv_cache():
    result = plan(device_free=4 * GIB)
    assert 0 < result.num_slots[0] < EXPERTS
    assert result.device_bytes <= 4 * GIB - RESERVED_BYTES
    one_more = result.device_bytes + LAYERS * FMT.block_bytes
    assert one_more > 4 * GIB - RESERVED_BYTES
    assert plan(device_free=80 * GIB).num_slots == (EXPERTS,) * LAYERS


def test_without_a_gpu_nothing_is_cached_by_default():
    result = plan(device_free=None)
    assert result.num_slots == (0,) * LAYERS
    assert result.host_bytes == MODEL + GIB
    assert plan(device_free=None, vram="1GiB").num_slots == (GIB // (LAYERS * FMT.block_bytes),) * LAYERS


def test_layers_of_different_sizes():
    small = ExpertFormat(64, 64, torch.bfloat16, Activation(ActivationKind.SILU))
    result = plan_memory(OffloadConfig(cache_expert_num=6), [FMT, small], [8, 4], 0, 80 * GIB, 80 * GIB)
    assert result.num_slots == (6, 4)
    assert result.cache_bytes == 6 * FMT.block_bytes + 4 * small.block_bytes
    assert result.buffer_bytes == 3 * FMT.block_bytes


def test_what_does_not_fit_is_said_with_numbers():
    with pytest.raises(MemoryLimitError, match=r"not enough host memory: the weights need 4\.50 GiB and 2\.00"):
        plan(host_free=2 * GIB)
    with pytest.raises(MemoryLimitError, match=r"not enough device memory: 1\.00 GiB of weights, 0\.98 GiB of cache"):
        plan(device_free=2 * GIB, cache_expert_num=28)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8GiB", 8 * GIB), ("500MB", 500_000_000), ("1.5g", 1_500_000_000), (" 7 KiB ", 7168), (42, 42), ("42", 42)],
)
def test_sizes(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "8PiB", "eight", "1..5G"])
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"cache_expert_num": -1}, "cache_expert_num must be a whole number of at least 0, not -1"),
        ({"cache_expert_num": 1, "vram": "1GiB"}, "not both"),
        ({"cache_topk": 0}, "cache_topk must be"),
        ({"update_expert_num": -2}, "update_expert_num must be"),
        ({"context_num_threads": 0}, "context_num_threads must be"),
        ({"miss_expert_num": 0}, "miss_expert_num must be"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"cache_expert_num": True}, "whole number"),
        ({"vram": "much"}, "is not a size"),
    ],
)
def test_bad_knobs(knobs, sentence):
    with pytest.raises(ConfigError, match=sentence):
        OffloadConfig(**knobs)
