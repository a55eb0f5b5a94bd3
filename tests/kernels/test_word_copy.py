"""Small copies, by the kernel and without it."""

import pytest
import torch

pytest.importorskip("triton")

import triton

from greenroom.kernels.gpu.word_copy import copy_words, word_copy_kernel

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def host(count: int, dtype: torch.dtype) -> torch.Tensor:
    words = torch.randint(-(2**31), 2**31 - 1, (count,)).to(dtype)
    return words.pin_memory() if DEVICE.type == "cuda" else words


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 37, 1024, 2500])
def test_either_way(count, dtype):
    source = host(count, dtype)
    on_device, back = torch.zeros(count + 3, dtype=dtype, device=DEVICE), torch.zeros_like(source)
    back = back.pin_memory() if DEVICE.type == "cuda" else back
    for copy in (copy_words, by_kernel):
        on_device.zero_()
        back.zero_()
        copy(on_device[:count], source)
        copy(back, on_device[:count])
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(back, source)
        assert torch.equal(on_device.cpu(), torch.cat([source, torch.zeros(3, dtype=dtype)])), "nothing behind it"


def by_kernel(target: torch.Tensor, source: torch.Tensor) -> None:
    word_copy_kernel[(triton.cdiv(source.numel(), 64),)](target, source, source.numel(), BLOCK=64)
