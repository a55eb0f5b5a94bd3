"""Products of a few rows with a dense matrix, as the native engine takes them."""

import torch

from greenroom.experts.job_checks import check_tensor
from greenroom.experts.native import DTYPES
from greenroom.kernels.cpu.library import NativeLinear


def native_linear(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> NativeLinear:
    """``out = x @ weight.T + bias``, after checking everything that the native side takes on trust.

    Raises:
        ValueError: a tensor has another shape, dtype, device or stride.
    """
    if weight.ndim != 2 or weight.dtype not in DTYPES:
        raise ValueError(f"weight must be half or single precision [rows, width], not {_text(weight)}")
    rows, width = weight.shape
    if x.ndim < 1 or x.shape[-1] != width:
        raise ValueError(f"x must be {weight.dtype} [..., {width}], not {_text(x)}")
    check_tensor("weight", weight, weight.dtype, (rows, width))
    check_tensor("x", x, weight.dtype, tuple(x.shape))
    check_tensor("out", out, weight.dtype, (*x.shape[:-1], rows))
    if bias is not None:
        check_tensor("bias", bias, weight.dtype, (rows,))
    return NativeLinear(
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        x.data_ptr(),
        out.data_ptr(),
        x.numel() // max(width, 1),
        rows,
        width,
        DTYPES[weight.dtype],
    )


def _text(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
