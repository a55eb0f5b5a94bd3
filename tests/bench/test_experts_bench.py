"""A tiny run of the expert benchmark: its fields make sense and its results are right."""

import json

import pytest
import torch

from greenroom.bench.experts import run_expert_benchmark


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_benchmark(dtype: torch.dtype) -> None:
    result = run_expert_benchmark(hidden=64, inter=32, experts=6, topk=2, tokens=3, threads=2, repeats=5, dtype=dtype)
    fields = json.loads(json.dumps(result.to_dict()))
    assert (fields["tokens"], fields["threads"], fields["dtype"]) == (3, 2, str(dtype)[6:])
    assert 2 <= result.experts_touched <= 6
    assert result.weight_bytes == result.experts_touched * 3 * 64 * 32 * dtype.itemsize
    assert result.gb_s == pytest.approx(result.weight_bytes / result.us / 1e3)
    assert result.tflop_s == pytest.approx(2 * 3 * 64 * 32 * 6 / result.us / 1e6)
    assert result.speedup == pytest.approx(result.torch_us / result.us)
    bound = 3e-2 if dtype is torch.bfloat16 else 1e-5
    assert 0 < result.max_error < bound
    assert result.torch_error < bound
    assert result.cpu
    assert result.isa != "auto"


def test_impossible_benchmarks_are_refused() -> None:
    with pytest.raises(ValueError, match="5 runs"):
        run_expert_benchmark(repeats=4)
    with pytest.raises(ValueError, match="nothing to measure"):
        run_expert_benchmark(experts=4, topk=5)
