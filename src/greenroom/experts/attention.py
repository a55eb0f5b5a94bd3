"""Attention of one new token over a KV cache, as the native engine takes it."""

import torch

from greenroom.experts.native import DTYPES
from greenroom.experts.rows import ROW_DTYPES
from greenroom.kernels.cpu.library import NativeAttention

_MOST_GROUP, _MOST_VALUE_WIDTH, _VALUE_STEP = 32, 512, 16


def can_attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether ``CpuExperts.attend`` takes these.

    Args:
        query: [Hq, ..., D]. key: [Hk, S, D]. value: [Hk, S, Dv].
    """
    heads, key_heads, value_width = query.shape[0], key.shape[0], value.shape[-1]
    return (
        query.dtype == key.dtype == value.dtype
        and query.dtype in ROW_DTYPES
        and key.shape[:2] == value.shape[:2]
        and key.shape[1] > 0
        and heads % key_heads == 0
        and heads // key_heads <= _MOST_GROUP
        and query.shape[-1] == key.shape[-1]
        and value_width <= _MOST_VALUE_WIDTH
        and value_width % _VALUE_STEP == 0
        and key.stride(2) == value.stride(2) == 1
        and query.device.type == key.device.type == value.device.type == "cpu"
    )


def native_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> NativeAttention:
    """``out = softmax(scale * query key^T) value``, after checking everything that the native side takes on trust.

    Raises:
        ValueError: a tensor has another shape, dtype, device or stride.
    """
    if query.ndim != 2 or not query.is_contiguous() or not can_attend(query, key, value):
        shapes = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in (query, key, value))
        raise ValueError(f"the CPU engine does not attend with {shapes}")
    return NativeAttention(
        q=query.data_ptr(),
        k=key.data_ptr(),
        v=value.data_ptr(),
        out=out.data_ptr(),
        length=key.shape[1],
        k_head=key.stride(0),
        k_position=key.stride(1),
        v_head=value.stride(0),
        v_position=value.stride(1),
        heads=query.shape[0],
        key_heads=key.shape[0],
        width=query.shape[1],
        value_width=value.shape[2],
        dtype=DTYPES[query.dtype],
        scale=scale,
    )
