"""Casts in kernels against torch's: by Triton's interpreter, too, which tests quicken and correct."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@triton.jit
def cast_kernel(source, target, BLOCK: tl.constexpr):
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + element, tl.load(source + element).to(target.dtype.element_ty))


def cast(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    target = torch.empty(len(source), dtype=dtype, device=DEVICE)
    cast_kernel[(len(source) // 1024,)](source.to(DEVICE), target, BLOCK=1024)
    return target.cpu()


def test_bfloat16_becomes_float32_exactly():
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    torch.testing.assert_close(cast(every, torch.float32), every.float(), rtol=0, atol=0, equal_nan=True)


def test_float32_becomes_the_nearest_bfloat16():
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    ends = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    values = torch.from_numpy((upper[:, None] | ends).reshape(-1).view(np.float32))
    torch.testing.assert_close(cast(values, torch.bfloat16), values.bfloat16(), rtol=0, atol=0, equal_nan=True)
