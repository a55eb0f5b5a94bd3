"""Rotary position embedding of queries and keys in one kernel, where a model's own code takes ten."""

import torch
import triton
import triton.language as tl


@triton.jit
def rope_kernel(
    query_out,
    key_out,
    query,
    key,
    cos,
    sin,
    tokens,
    query_batch,
    query_head,
    query_token,
    key_batch,
    key_head,
    key_token,
    table_batch,
    table_token,
    QUERY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_POW2: tl.constexpr,
):
    """Grid (batch * tokens, HEADS). The first QUERY_HEADS are heads of the query, the others of the key.

    Args:
        query_out, key_out: written: [batch, heads, tokens, 2 * HALF], contiguous.
        query, key: the same shape; the last dimension contiguous.
        cos, sin: [batch or 1, tokens, 2 * HALF], the last dimension contiguous.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, token = row // tokens, row % tokens
    lane = tl.arange(0, HALF_POW2)
    inside = lane < HALF
    if head < QUERY_HEADS:
        source = query + batch * query_batch + head * query_head + token * query_token
        target = query_out + ((batch * QUERY_HEADS + head) * tokens + token) * 2 * HALF
    else:
        head = head - QUERY_HEADS
        source = key + batch * key_batch + head * key_head + token * key_token
        target = key_out + ((batch * (HEADS - QUERY_HEADS) + head) * tokens + token) * 2 * HALF
    table = batch * table_batch + token * table_token + lane
    low = tl.load(source + lane, mask=inside, other=0.0)
    high = tl.load(source + HALF + lane, mask=inside, other=0.0)
    low_cos = tl.load(cos + table, mask=inside, other=0.0)
    high_cos = tl.load(cos + table + HALF, mask=inside, other=0.0)
    low_sin = tl.load(sin + table, mask=inside, other=0.0)
    high_sin = tl.load(sin + table + HALF, mask=inside, other=0.0)
    tl.store(target + lane, _turned(low, low_cos, high, low_sin, -1.0), mask=inside)
    tl.store(target + HALF + lane, _turned(high, high_cos, low, high_sin, 1.0), mask=inside)


@triton.jit
def _turned(own, cos, other, sin, sign):
    """``own * cos + sign * other * sin``, each product rounded before the sum, as models do."""
    dtype = own.dtype
    first = (own.to(tl.float32) * cos.to(tl.float32)).to(dtype)
    second = (sign * other.to(tl.float32) * sin.to(tl.float32)).to(dtype)
    return (first.to(tl.float32) + second.to(tl.float32)).to(dtype)


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x * cos + rotate_half(x) * sin`` of query and key, the two halves of a head turned against each other.

    Args:
        query: [B, Hq, T, D]; key: [B, Hk, T, D]; D even, the last dimension contiguous.
        cos, sin: [B or 1, T, D] of the same dtype, with the same strides.

    Returns:
        Contiguous tensors of the shapes of query and key.
    """
    batch, query_heads, tokens, dim = query.shape
    heads = query_heads + key.shape[1]
    query_out, key_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
    half = dim // 2
    rope_kernel[(batch * tokens, heads)](
        query_out,
        key_out,
        query,
        key,
        cos,
        sin,
        tokens,
        *query.stride()[:3],
        *key.stride()[:3],
        cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1),
        QUERY_HEADS=query_heads,
        HEADS=heads,
        HALF=half,
        HALF_POW2=triton.next_power_of_2(half),
        num_warps=1,
        # Else the compiler fuses a bfloat16 product with the sum, which models round in between.
        enable_fp_fusion=False,
    )
    return query_out, key_out
