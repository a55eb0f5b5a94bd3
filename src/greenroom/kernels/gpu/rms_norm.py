"""RMS normalisation in one kernel, where a model's own code takes eight."""

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(out, hidden, weight, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows,). out, hidden: [rows, WIDTH], contiguous; weight: [WIDTH]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(hidden + row * WIDTH + column, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + epsilon)
    # Rounded before the weight, as models do.
    normal = (wide * scale).to(value.dtype).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (normal * factor).to(out.dtype.element_ty), mask=inside)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """``weight * (x / sqrt(mean(x^2) + epsilon))`` over the last dimension, the quotient rounded to x's dtype.

    Args:
        hidden: [..., W], contiguous.
        weight: [W].

    Returns:
        [..., W] of the dtype that ``weight * hidden`` has.
    """
    width = hidden.shape[-1]
    out = torch.empty(hidden.shape, dtype=torch.promote_types(hidden.dtype, weight.dtype), device=hidden.device)
    rows = hidden.numel() // width
    if rows:
        block = triton.next_power_of_2(width)
        warps = max(1, min(8, block // 512))
        rms_norm_kernel[(rows,)](out, hidden, weight, epsilon, WIDTH=width, BLOCK=block, num_warps=warps)
    return out
