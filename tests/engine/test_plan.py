"""Plans against numbers computed by hand, measured ones, and what a model that is loaded reports."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import greenroom
from greenroom.bench.shapes import shape_config
from greenroom.config import OffloadConfig
from greenroom.engine import offload as offload_module
from greenroom.engine.demand import Demand, working_memory
from greenroom.engine.held_memory import DeviceMemory
from greenroom.engine.model_shape import KvLayer, ModelShape, probe_shape
from greenroom.engine.offload import offload_of
from greenroom.engine.plan import Machine, plan_model
from greenroom.engine.request import weights_config
from greenroom.engine.sizes import BUCKETS
from greenroom.engine.skeleton import read_config
from greenroom.engine.speed import Rates, assumed_hit_rate, distinct_experts, pass_time
from greenroom.errors import ConfigError, MemoryLimitError

GIB = 2**30
EXPERT = 3 * 2048 * 768 * 2
H100 = Rates(cpu_gb_s=76, cpu_tflop_s=4.4, pcie_gb_s=49.1, dense_gb_s=3000, dense_tflop_s=500)
"""Both lanes at once as ``greenroom bench bandwidth`` measured them; see docs/performance.md."""
DEMAND = Demand()
TINY = Path(__file__).parents[2] / "examples" / "tiny-moe"


@pytest.fixture(scope="module")
def q30() -> ModelShape:
    return probe_shape(shape_config("q30-12L"), torch.bfloat16)


def plan(shape, device=80 * GIB, host=128 * GIB, rates=H100, demand=DEMAND, prompt=512, hit_rate=None, **knobs):
    config = OffloadConfig(**knobs)
    if device is None:
        rates = dataclasses.replace(rates, pcie_gb_s=None)
    return plan_model(
        shape,
        config,
        weights_config(config),
        demand,
        Machine(device, host),
        rates,
        prompt_tokens=prompt,
        hit_rate=hit_rate,
    )


def test_two_cores_without_a_gpu_within_a_quarter_of_what_was_measured(q30):
    """6.6 tok/s; 25 GB/s of experts, and attention and head through torch at about 10 GB/s."""
    rates = Rates(cpu_gb_s=25, cpu_tflop_s=1.13, pcie_gb_s=None, dense_gb_s=10, dense_tflop_s=1)
    result = plan(q30, device=None, rates=rates)
    assert result.decode_one == pytest.approx(6.6, rel=0.25)
    assert result.hit_rate == 0


def test_a_decode_step_by_hand(q30):
    """Twelve layers of eight experts over both lanes and 60 us each, attention and head at the memory's rate."""
    attention = 12 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128 + 2048 * 128 + 2 * 2048) + 2048
    expected = 12 * (8 * EXPERT / (76e9 + 49.1e9) + 60e-6) + 2 * (attention + 151936 * 2048) / 3e12 + 100e-6
    assert 1 / plan(q30, cache_expert_num=0).decode_one == pytest.approx(expected, rel=1e-6)
    # A given hit rate: a quarter of the experts from slots, at the memory's rate.
    expected += 12 * (2 * EXPERT / 3e12 - 2 * EXPERT / (76e9 + 49.1e9))
    assert 1 / plan(q30, cache_expert_num=32, hit_rate=0.25).decode_one == pytest.approx(expected, rel=1e-6)


def test_distinct_experts():
    assert distinct_experts(1, 8, 128) == pytest.approx(8)
    assert distinct_experts(16, 8, 128) == pytest.approx(82.4, abs=0.1)
    assert distinct_experts(5000, 8, 128) == pytest.approx(128)
    assert distinct_experts(3, 4, 4) == 4


def test_hit_rates(q30):
    assert [assumed_hit_rate(share) for share in (0, 0.125, 0.25, 1)] == [0, 0.62, 0.77, 1]
    result = plan(q30, cache_expert_num=32)
    assert (result.hit_rate, result.hit_rate_from) == (0.77, "assumed for 25% of the experts cached")
    assert plan(q30, cache_expert_num=32, hit_rate=0.5).hit_rate_from == "given"
    faster = [plan(q30, cache_expert_num=slots).decode_one for slots in (0, 16, 32, 64, 128)]
    assert faster == sorted(faster)
    # A prompt that needs every expert hits only what share is cached.
    without, half, most = (pass_time(q30, (slots,) * 12, H100, 4000, 1).total for slots in (0, 64, 96))
    assert without - half == pytest.approx((without - most) * 2 / 3, rel=0.01)
    # With nearly all of them cached the host is what it waits for, however short it is; with all of them it need not.
    few, many = (pass_time(q30, (127,) * 12, H100, tokens, 1).layers for tokens in (64, 1024))
    assert few == many == pytest.approx(12 * 3.3e-3)
    all_cached = pass_time(q30, (128,) * 12, H100, 1024, 1).layers
    assert all_cached == pytest.approx(12 * (1.8e-3 + 128 * 3 * 2048 * 768 * 2 / (H100.dense_gb_s * 1e9)))
    assert pass_time(q30, (128,) * 12, H100, 2, 1).layers == pytest.approx(12 * 2e-3)


def test_offloaded_weights_cross_beside_experts(q30):
    """All attention: 37.7 MB a layer more for PCIe, so the CPU takes more experts; both lanes end together."""
    knobs = {"weights_offload_group_size": 1, "weights_offload_params": "self_attn"}
    step = 1 / plan(q30, cache_expert_num=0).decode_one
    block = 37_749_248  # q, k, v, o; two norms of 256 bytes
    extra = 1 / plan(q30, cache_expert_num=0, **knobs).decode_one - step
    assert extra == pytest.approx(12 * block / (76e9 + 49.1e9), rel=1e-3)
    cached = 1 / plan(q30, cache_expert_num=128).decode_one
    assert 1 / plan(q30, cache_expert_num=128, **knobs).decode_one - cached == pytest.approx(
        12 * block / 49.1e9, rel=1e-3
    )
    # Read in place, they cross while nothing else does.
    in_place = {"weights_offload_backend": "uva", "weights_offload_params": "self_attn"}
    assert 1 / plan(q30, cache_expert_num=0, **in_place).decode_one - step == pytest.approx(
        12 * block / 49.1e9, rel=1e-3
    )
    few = plan(q30, cache_expert_num=0, **knobs)
    assert few.device_parts["weight_buffers"] == block
    assert few.host_parts["offloaded_weights"] == 12 * block
    assert sum(few.device_parts.values()) == sum(plan(q30, cache_expert_num=0).device_parts.values()) - 11 * block


def test_memory_by_hand(q30):
    result = plan(q30, cache_expert_num=10, demand=Demand(1000, 3))
    weights = 12 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128 + 2048 * 128 + 2 * 2048) + 2048 + 2 * 151936 * 2048
    device = result.device_parts
    assert device["weights"] == pytest.approx(2 * weights, rel=1e-5)  # rotary frequencies beside them
    assert device["expert_cache"] == 12 * 10 * EXPERT
    assert device["miss_buffers"] == 3 * 16 * EXPERT
    assert device["kv_cache"] == 3 * 1000 * 12 * 2048
    # Steps of 4 sequences: 32 experts fetched, their activations, 32 partial sums of 2048 floats, logits.
    assert device["decode_buffers"] == 32 * EXPERT + 32 * 4 * 768 * 2 + 32 * 2048 * 4 + 3 * 4 * 151936 * 2
    assert result.host_parts == {"experts": 12 * 128 * EXPERT, "offloaded_weights": 0}
    assert result.problem is None


def test_the_default_cache_leaves_room_for_what_is_to_run(q30):
    """As many slots as fit beside it, and one GiB or a seventh of the memory is kept in any case."""
    slots = []
    for sequences in (1, 2, 3):
        result = plan(q30, device=14 * GIB, demand=Demand(40960, sequences))
        total, kept = sum(result.device_parts.values()), max(int(0.15 * 14 * GIB), result.working.total)
        unused = 14 * GIB - (total - result.working.total) - kept
        assert result.problem is None
        assert 0 <= unused < 12 * EXPERT
        slots.append(result.memory.num_slots[0])
    assert slots[0] > slots[1] > slots[2] > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"host": 8 * GIB}, "not enough host memory: the weights need 13.50 GiB and 8.00 GiB are available"),
        ({"device": 2 * GIB}, r"0\.00 GiB of cache slots.*less context or concurrency, or keep weights in host memory"),
        ({"device": 8 * GIB, "cache_expert_num": 128}, "give a smaller cache_expert_num"),
        ({"device": 8 * GIB, "demand": Demand(40960, 16)}, "GiB for KV cache and activations exceed the 8.00 GiB"),
        ({"device": None, "host": 14 * GIB}, "not enough host memory"),
    ],
)
def test_what_does_not_fit_is_said(q30, arguments, sentence):
    problem = plan(q30, **arguments).problem
    assert problem is not None
    assert re.search(sentence, problem)


def test_numbers_out_of_range(q30):
    with pytest.raises(ConfigError, match="the hit rate is a share from 0 to 1, not 77"):
        plan(q30, hit_rate=77)
    with pytest.raises(ConfigError, match="the model's context is 40960 tokens, not 50000"):
        plan(q30, demand=Demand(50_000))
    with pytest.raises(ConfigError, match="concurrency must be at least 1"):
        Demand(100, 0)
    with pytest.raises(ConfigError, match="prompt_tokens must be at least 1"):
        plan(q30, prompt=0)
    with pytest.raises(ConfigError, match="cpu_gb_s must be more than 0"):
        Rates(0, 1, 1, 1, 1)
    with pytest.raises(ConfigError, match="needs the bandwidth of PCIe"):
        plan(q30, rates=dataclasses.replace(H100, pcie_gb_s=None))


def test_without_a_gpu_everything_is_in_host_memory(q30):
    result = plan(q30, device=None)
    assert result.device_parts == {}
    assert result.host_parts["weights"] == q30.spec.other_bytes
    assert result.host_parts["decode_buffers"] == result.host_parts["libraries"] == 0
    assert sum(result.host_parts.values()) == result.memory.host_bytes


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
OFFLOAD = {"weights_offload_group_size": 2, "weights_offload_prefetch_step": 2}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("knobs", [{"cache_expert_num": 8}, {"cache_expert_num": 0, **OFFLOAD}])
def test_a_loaded_model_reports_what_was_planned(device, knobs):
    shape = probe_shape(read_config(TINY), torch.bfloat16)
    demand = Demand(256, 2)
    planned = plan(shape, None if device == "cpu" else 16 * GIB, 16 * GIB, demand=demand, **knobs)
    before = 0
    if device == "cuda":
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # libraries' workspaces are not the model's
        before = torch.cuda.memory_allocated()
    model, _ = greenroom.load(TINY, progress=False, device=device, demand=demand, **knobs)
    try:
        stats = greenroom.stats(model)
        assert offload_of(model).plan == planned.memory
        assert stats.cache_expert_num == max(planned.memory.num_slots)
        assert stats.host_bytes == pytest.approx(planned.host_parts["experts"], rel=0.05)
        assert stats.weights_host_bytes == planned.host_parts["offloaded_weights"]
        memory = offload_of(model).memory(model)
        assert memory.host == pytest.approx(memory.host_planned, rel=0.05)
        if device == "cuda":
            assert memory.device_planned == sum(planned.device_parts.values())
            assert memory.device is not None
            assert memory.device <= memory.device_planned
        resident = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(model)}
        assert sum(resident.values()) == pytest.approx(planned.memory.other_bytes, rel=0.05)
        if device == "cuda":
            assert stats.device_bytes == planned.memory.cache_bytes + planned.memory.buffer_bytes
            used, expected = torch.cuda.memory_allocated() - before, planned.memory.device_bytes
            # The allocator rounds each of some hundred tensors up to 512 bytes, which counts in so small a model.
            assert 0.95 * expected <= used <= 1.05 * expected + 200_000
    finally:
        greenroom.close(model)


@pytest.mark.parametrize(
    ("allocated", "warned"), [(10 * GIB, False), (10.4 * GIB, False), (10.6 * GIB, True), (9.4 * GIB, True)]
)
def test_a_model_that_holds_something_else_says_so(q30, monkeypatch, caplog, allocated, warned):
    """Beside what the process had allocated before it."""
    memory = dataclasses.replace(plan(q30).memory, cache_bytes=10 * GIB, buffer_bytes=0, other_bytes=0)
    before = DeviceMemory(free=80 * GIB, cached=0, allocated=GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: GIB + int(allocated))
    offload_module._compare_with_plan(SimpleNamespace(before=before, device=torch.device("cuda"), plan=memory))
    assert ("GiB of device memory, 10.00 were planned" in caplog.text) == warned


def test_a_small_model_may_round_up(q30, monkeypatch, caplog):
    memory = dataclasses.replace(plan(q30).memory, cache_bytes=0, buffer_bytes=0, other_bytes=1 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100 << 20)
    offload_module._compare_with_plan(
        SimpleNamespace(before=DeviceMemory(GIB, 0, 0), device=torch.device("cuda"), plan=memory)
    )
    assert caplog.text == ""


def test_second_halves_are_counted_where_steps_may_have_them(q30):
    def decode_bytes(concurrency: int, dbo: str, serving: bool = True) -> int:
        return working_memory(q30, Demand(1000, concurrency, None, serving, dbo), on_gpu=True).decode_bytes

    # The largest decode step is the same for all: a server's passes of 32 tokens.
    whole = decode_bytes(8, "off")
    assert decode_bytes(4, "auto") == decode_bytes(8, "off") == decode_bytes(32, "off") == whole
    assert whole < decode_bytes(5, "auto") == decode_bytes(8, "auto") == decode_bytes(8, "on")
    assert whole < decode_bytes(2, "on") < decode_bytes(8, "auto") < decode_bytes(16, "auto")
    assert decode_bytes(8, "auto", serving=False) == decode_bytes(8, "off", serving=False)
    # Of four rows: 32 experts of 9 MiB in the fetch buffer, and what they compute.
    fmt = q30.spec.layers[0].format
    activations = 32 * 4 * fmt.inter * 2 + 32 * fmt.hidden * 4
    assert decode_bytes(8, "auto") - whole == 32 * fmt.block_bytes + activations


def test_decode_buffers_that_a_configuration_does_without(q30):
    """Nothing is fetched where every expert was asked to have a slot, and prefetched weights allow no halves."""

    def decode_bytes(**knobs: object) -> int:
        demand = Demand(1000, 8, serving=True, dbo="auto")
        return working_memory(q30, demand, on_gpu=True, config=OffloadConfig(**knobs)).decode_bytes

    fetch, halves = 32 * EXPERT, decode_bytes() - decode_bytes(weights_offload_group_size=1)
    assert halves > fetch
    assert decode_bytes() == decode_bytes(cache_expert_num=127) == decode_bytes(weights_offload_backend="uva")
    assert decode_bytes(cache_expert_num=128) == decode_bytes(cache_expert_num=999) == decode_bytes() - 2 * fetch
    both = plan(
        q30, cache_expert_num=128, weights_offload_group_size=1, demand=Demand(1000, 8, serving=True, dbo="auto")
    )
    assert both.device_parts["decode_buffers"] == decode_bytes() - halves - fetch


def test_memory_of_a_server(q30):
    """KV cache in whole blocks and one for padding; decode steps take any pass of few tokens."""
    serving = working_memory(q30, Demand(1000, 3, serving=True), on_gpu=True)
    assert serving.kv_bytes == (3 * 63 + 1) * 16 * 12 * 2048
    many = working_memory(q30, Demand(1000, BUCKETS[-1]), on_gpu=True)
    assert serving.decode_bytes == many.decode_bytes
    assert working_memory(q30, Demand(1000, 3, 3, serving=True), on_gpu=True).decode_bytes < serving.decode_bytes


def test_memory_of_a_server_whose_layers_differ(q30):
    """Every layer has all blocks, whether it looks back further than its window or not. States are one sequence's."""
    window, state = KvLayer(2048, 128, 0), KvLayer(0, None, 1 << 20)
    half = dataclasses.replace(q30, kv=q30.kv[:6] + (window,) * 6, plain_cache=False)
    assert working_memory(half, Demand(1600, 2), False).kv_bytes == 2 * 2048 * 6 * (1600 + 128)
    assert working_memory(half, Demand(1600, 2), True).kv_bytes == (2 * 100 + 1) * 16 * 12 * 2048
    assert working_memory(half, Demand(1600, 2, serving=True), True).kv_bytes == (2 * 100 + 1) * 16 * 12 * 2048
    alone = dataclasses.replace(q30, kv=(*q30.kv[:11], state))
    assert working_memory(alone, Demand(1600, 2, serving=True), True).kv_bytes == 11 * 2048 * 1600 + (1 << 20)


def tensors_of(model):
    """Parameters and buffers that are not experts."""
    return [*model.parameters(), *model.buffers()]


def test_a_demand_that_does_not_fit_is_refused_before_loading(monkeypatch):
    shape = probe_shape(read_config(TINY), torch.bfloat16)
    alone = plan(shape, None, GIB, demand=Demand(1, 1)).memory
    room = alone.host_bytes - alone.reserved_bytes + (1 << 20)
    monkeypatch.setattr("greenroom.hardware.available_host_bytes", lambda: room)
    monkeypatch.setattr("greenroom.engine.loader.load_without_experts", lambda *_: pytest.fail("loaded"))
    with pytest.raises(MemoryLimitError, match="not enough host memory"):
        greenroom.load(TINY, progress=False, device="cpu", demand=Demand(256, 64))


def test_working_memory_grows_with_what_it_is_for(q30):
    one = working_memory(q30, Demand(1000, 1), on_gpu=True)
    two = working_memory(q30, Demand(1000, 2), on_gpu=True)
    assert two.kv_bytes == 2 * one.kv_bytes
    assert two.decode_bytes > one.decode_bytes
    assert working_memory(q30, Demand(1000, 1, 100), on_gpu=True).activation_bytes < one.activation_bytes
    assert (
        working_memory(q30, Demand(1000, 100), on_gpu=True).decode_bytes
        == working_memory(q30, Demand(1000, 32), on_gpu=True).decode_bytes
    )
