"""Copies of a block on its device: that block of every tensor, and nothing else."""

import pytest
import torch

from greenroom.kv import device_copies
from greenroom.kv.device_copies import block_copy


@pytest.fixture(params=["loop", "kernel", pytest.param("cuda", marks=pytest.mark.cuda)])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


def tensors_on(device: str) -> list[torch.Tensor]:
    """Layers of different widths and types; one is a slice, as values may lie behind keys."""
    torch.manual_seed(0)
    return [
        torch.randn(7, 4, 2, 8, device=device),
        torch.randn(7, 4, 2, 6, device=device).to(torch.bfloat16),
        torch.randn(14, 4, 5, device=device)[7:],
        torch.randn(7, 4, 1, 3000, device=device),  # longer than what a program moves at a time
    ]


def test_one_block_becomes_as_another(way: str) -> None:
    tensors = tensors_on("cuda" if way == "cuda" else "cpu")
    if way == "kernel" and torch.cuda.is_available():
        pytest.skip("a kernel on a CPU device needs Triton's interpreter")
    copy = device_copies._by_kernel(tensors) if way == "kernel" else block_copy(tensors)
    for source, target in ((0, 6), (3, 2), (5, 5)):
        expected = [tensor.clone() for tensor in tensors]
        for tensor in expected:
            tensor[target] = tensor[source]
        copy(source, target)
        assert all(torch.equal(tensor, right) for tensor, right in zip(tensors, expected, strict=True))
