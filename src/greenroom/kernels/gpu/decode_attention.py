"""Attention of one new token a sequence over a KV cache of fixed size.

Query heads that share a key head are computed together, so keys and values are read once and never repeated in
memory. Each program takes a stretch of the cache; blocks that the mask rules out are not read. A second
kernel merges the stretches (the usual rescaling by each one's maximum).
"""

import torch
import triton
import triton.language as tl

_BLOCK = 64
_MOST_STRETCHES = 32


@triton.jit
def multiply(left, right, WIDEN: tl.constexpr):
    """A matrix product in float32. WIDEN: of operands in float32, as the interpreter needs it."""
    if WIDEN:
        product = tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(left, right, input_precision="ieee")
    return product


@triton.jit
def attend_block(products, values, seen, largest, total, sums, WIDEN: tl.constexpr):
    """Adds a stretch of keys to a running softmax. At least one of them is seen, or ``largest`` is finite.

    Args:
        products: float32 [queries, n], scaled; values: [n, Dv]; seen: bool [n].
        largest, total: float32 [queries]: of products so far, and the sum of weights beside it.
        sums: float32 [queries, Dv], weighted values.

    Returns:
        largest, total, sums.
    """
    products = tl.where(seen[None, :], products, float("-inf"))
    larger = tl.maximum(largest, tl.max(products, axis=1))
    weight = tl.exp(products - larger[:, None])
    shrink = tl.exp(largest - larger)
    total = total * shrink + tl.sum(weight, axis=1)
    return larger, total, sums * shrink[:, None] + multiply(weight.to(values.dtype), values, WIDEN)


@triton.jit
def attend_kernel(
    partial,
    stats,
    query,
    key,
    value,
    mask,
    scale,
    query_batch,
    query_head,
    key_batch,
    key_head,
    value_batch,
    value_head,
    mask_batch,
    LENGTH: tl.constexpr,
    STRETCH: tl.constexpr,
    STRETCHES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Grid (batch, key heads, STRETCHES).

    Args:
        partial: written: float32 [batch, key heads, STRETCHES, GROUP, VALUE_DIM], sums of each stretch.
        stats: written: float32 [batch, key heads, STRETCHES, GROUP, 2], maximum and sum of weights.
        query: [batch, key heads * GROUP, 1, DIM]; key, value: [batch, key heads, LENGTH, DIM or VALUE_DIM].
            Their last two dimensions are contiguous.
        mask: bool [batch or 1, 1, 1, LENGTH], True where the token may look.
        scale: factor on products.
    """
    batch, head, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    member = tl.arange(0, GROUP_POW2)
    dim = tl.arange(0, DIM_POW2)
    value_dim = tl.arange(0, VALUE_DIM_POW2)
    is_member = member < GROUP
    asked = tl.load(
        query + batch * query_batch + (head * GROUP + member)[:, None] * query_head + dim[None, :],
        mask=is_member[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    largest = tl.full((GROUP_POW2,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_POW2,), tl.float32)
    sums = tl.zeros((GROUP_POW2, VALUE_DIM_POW2), tl.float32)
    for first in range(0, STRETCH, BLOCK):
        position = stretch * STRETCH + first + tl.arange(0, BLOCK)
        seen = tl.load(mask + batch * mask_batch + position, mask=position < LENGTH, other=0) != 0
        if tl.sum(seen.to(tl.int32), axis=0) > 0:
            keys = tl.load(
                key + batch * key_batch + head * key_head + position[None, :] * DIM + dim[:, None],
                mask=seen[None, :] & (dim < DIM)[:, None],
                other=0.0,
            )
            values = tl.load(
                value + batch * value_batch + head * value_head + position[:, None] * VALUE_DIM + value_dim[None, :],
                mask=seen[:, None] & (value_dim < VALUE_DIM)[None, :],
                other=0.0,
            )
            products = multiply(asked, keys, WIDEN) * scale
            largest, total, sums = attend_block(products, values, seen, largest, total, sums, WIDEN)
    row = ((batch * tl.num_programs(1) + head) * STRETCHES + stretch) * GROUP + member
    tl.store(
        partial + row[:, None] * VALUE_DIM + value_dim[None, :],
        sums,
        mask=is_member[:, None] & (value_dim < VALUE_DIM)[None, :],
    )
    tl.store(stats + row * 2, largest, mask=is_member)
    tl.store(stats + row * 2 + 1, total, mask=is_member)


@triton.jit
def merge_kernel(
    out,
    partial,
    stats,
    sinks,
    key_heads,
    STRETCHES: tl.constexpr,
    STRETCHES_POW2: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_POW2: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Grid (batch * key heads, GROUP).

    Args:
        out: written: [batch, key heads * GROUP, VALUE_DIM].
        sinks: [key heads * GROUP], logits of a place without a value, if SINKS.
    """
    head, member = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stretch = tl.arange(0, STRETCHES_POW2)
    dim = tl.arange(0, VALUE_DIM_POW2)
    real = stretch < STRETCHES
    row = (head * STRETCHES + stretch) * GROUP + member
    largest = tl.load(stats + row * 2, mask=real, other=float("-inf"))
    total = tl.load(stats + row * 2 + 1, mask=real, other=0.0)
    most = tl.max(largest, axis=0)
    if SINKS:
        sink = tl.load(sinks + head % key_heads * GROUP + member).to(tl.float32)
        most = tl.maximum(most, sink)
    # Stretches that saw nothing have no maximum and no weight.
    factor = tl.where(total > 0, tl.exp(largest - most), 0.0)
    sums = tl.load(
        partial + row[:, None] * VALUE_DIM + dim[None, :], mask=real[:, None] & (dim < VALUE_DIM)[None, :], other=0.0
    )
    weights = tl.sum(total * factor, axis=0)
    if SINKS:
        weights += tl.exp(sink - most)
    merged = tl.sum(sums * factor[:, None], axis=0) / weights
    tl.store(out + (head * GROUP + member) * VALUE_DIM + dim, merged.to(out.dtype.element_ty), mask=dim < VALUE_DIM)


def decode_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax attention of one query position.

    Args:
        query: [B, Hq, 1, D]; key: [B, Hk, S, D]; value: [B, Hk, S, Dv], Hq a multiple of Hk; the last two
            dimensions of key and value contiguous.
        mask: bool [B or 1, 1, 1, S], True where the token may look; at least one place a sequence.
        scale: factor on products.

    Returns:
        [B, 1, Hq, Dv] of query's dtype.
    """
    batch, heads, _, dim = query.shape
    key_heads, length, value_dim = key.shape[1], key.shape[2], value.shape[3]
    group = heads // key_heads
    stretches = min(triton.cdiv(length, _BLOCK), _MOST_STRETCHES)
    stretch = triton.cdiv(triton.cdiv(length, _BLOCK), stretches) * _BLOCK
    rows = batch * key_heads * stretches * group
    partial = torch.empty(rows, value_dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(rows, 2, dtype=torch.float32, device=query.device)
    out = torch.empty(batch, 1, heads, value_dim, dtype=query.dtype, device=query.device)
    attend_kernel[(batch, key_heads, stretches)](
        partial,
        stats,
        query,
        key,
        value,
        mask.view(torch.uint8),
        scale,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        mask.stride(0) if mask.shape[0] > 1 else 0,
        LENGTH=length,
        STRETCH=stretch,
        STRETCHES=stretches,
        GROUP=group,
        GROUP_POW2=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        DIM_POW2=max(16, triton.next_power_of_2(dim)),
        VALUE_DIM=value_dim,
        VALUE_DIM_POW2=max(16, triton.next_power_of_2(value_dim)),
        BLOCK=_BLOCK,
        WIDEN=query.device.type != "cuda",
    )
    merge_kernel[(batch * key_heads, group)](
        out,
        partial,
        stats,
        out,
        key_heads,
        STRETCHES=stretches,
        STRETCHES_POW2=triton.next_power_of_2(stretches),
        GROUP=group,
        VALUE_DIM=value_dim,
        VALUE_DIM_POW2=triton.next_power_of_2(value_dim),
        SINKS=False,
    )
    return out
