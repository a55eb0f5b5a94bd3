"""The line at start says what was made. Without vLLM."""

import re

import pytest
import torch

from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.vllm_plugin.binding import Share
from greenroom.vllm_plugin.formats import LayerFormat
from greenroom.vllm_plugin.options import MoeOffloadOptions
from greenroom.vllm_plugin.rank import RankExperts
from greenroom.vllm_plugin.steps import NoSteps, StepDriver
from greenroom.vllm_plugin.summary import describe_rank

FMT = ExpertFormat(256, 256, torch.float32, Activation(ActivationKind.SILU))  # 0.75 MiB


@pytest.fixture
def line():
    """The line of a rank with layers of so many experts."""
    made = []

    def make(options, counts=(8, 8), ranks=(0, 1), driver=StepDriver, **changes):
        experts = RankExperts(options, torch.device("cpu"), Share(*ranks, beside_gpu=False))
        made.append(experts)
        with experts.building():
            for count in counts:
                experts.add_layer(LayerFormat(FMT, False), count, 2)
        experts.finish()
        for name, value in changes.items():
            setattr(experts, name, value)
        steps = driver(experts)
        return describe_rank(experts, steps.way, steps.counts)

    yield make
    for experts in made:
        experts.close()


def test_everything_is_in_it(line):
    options = MoeOffloadOptions(3, 1, 4, 1, "lru")
    said = line(options, counts=(700, 700), cores=[1, 2, 3, 8], load_seconds=2.34)
    isa = r"[a-z0-9-]+"
    assert re.fullmatch(
        "Expert offloading: 2 layers of 700 experts, 3 slots a layer; "
        r"1\.03 GiB of experts in host memory, not page-locked, and 0\.00 GiB of host memory for slots; "
        f"1 CPU thread on cores 1-3,8, {isa}; policy lru, cache_topk 1, update_expert_num 4; model loaded in 2\\.3 s; "
        "the host decides every step, layer by layer",
        said,
    ), said


def test_defaults_and_layers_that_differ(line):
    said = line(MoeOffloadOptions(6, context_num_threads=1), counts=(4, 8), cores=None)
    assert "2 layers of 4 to 8 experts, 4 to 6 slots a layer" in said
    assert "1 CPU thread not pinned" in said
    assert "policy lfru, cache_topk all 2, update_expert_num 2" in said


def test_which_rank_of_several(line):
    assert line(MoeOffloadOptions(context_num_threads=1), ranks=(1, 4)).startswith("Expert offloading, rank 2 of 4: ")


def test_what_has_no_effect_is_said(line):
    nothing = "policy, cache_topk and update_expert_num have no effect"
    assert f"without slots, {nothing}" in line(MoeOffloadOptions(0, context_num_threads=1))
    assert f"with slots for all experts, {nothing}" in line(MoeOffloadOptions(8, context_num_threads=1))
    said = line(MoeOffloadOptions(8, context_num_threads=1), driver=NoSteps)
    assert said.endswith(
        "all experts have slots: vLLM's own kernels run them, nothing is counted, and policy, cache_topk, "
        "update_expert_num and threads have no effect"
    )
    assert "policy lfru" not in said
    assert said.count("no effect") == 1


def test_beside_a_gpu_its_memory_is_named(line):
    said = line(MoeOffloadOptions(2, context_num_threads=1), device=torch.device("cuda"), device_bytes=3 << 29)
    assert "1.50 GiB of GPU memory for slots and buffers" in said
