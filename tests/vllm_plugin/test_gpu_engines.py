"""The GPU's way through real vLLM engines, its kernels run by Triton's interpreter: greedy tokens are stock vLLM's."""

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytest.importorskip("triton")

from greenroom.vllm_plugin import cpu_worker
from greenroom.vllm_plugin.gpu_steps import GpuStepDriver
from tests.experts.test_decode_path import only
from tests.reference.interpreted import few_large_tiles
from tests.vllm_plugin.engines import engine, greedy, offload

pytestmark = [
    pytest.mark.usefixtures("vllm_environment"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="plays the device on the CPU, by the interpreter"),
]

LENGTHS = (3, 5, 17)
"""Of prompts: their passes, too, run without the host."""


class Driver(GpuStepDriver):
    """Half of the absent experts cross PCIe. ahead: steps that were begun while the one before was open."""

    ahead = 0

    def __init__(self, experts):
        super().__init__(experts)
        self._steps.split = only(5, 16)
        begin = self._steps.begin

        def counted(*args, **options):
            Driver.ahead += self._steps.num_open
            begin(*args, **options)

        self._steps.begin = counted


def two_answers(model, **arguments):
    """The second time with a cache that has learnt; and what was counted."""
    with engine(model, **arguments) as llm:
        tokens = [greedy(llm, 256, 10, LENGTHS) for _ in range(2)]
        stats = llm.collective_rpc("moe_offload_stats")[0]["total"] if arguments else None
    return tokens, stats


def test_tokens_are_those_of_stock_vllm(tiny_model, monkeypatch):
    model = tiny_model("qwen3_moe", torch.float32)
    stock, _ = two_answers(model)
    monkeypatch.setattr(cpu_worker.OffloadCPUWorker, "make_steps", lambda worker, experts, layers: Driver(experts))
    few_large_tiles(monkeypatch)
    monkeypatch.setattr(Driver, "ahead", 0)
    tokens, stats = two_answers(model, **offload(5, policy="lru"))
    assert tokens == stock
    assert min(stats[name] for name in ("hits", "streamed", "cpu", "landed", "evictions")) > 5
    assert Driver.ahead > 10
