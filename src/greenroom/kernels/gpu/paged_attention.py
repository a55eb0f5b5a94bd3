"""Attention of one new token a sequence over keys and values in blocks.

As ``decode_attention``, but a table says where each sequence's blocks are, and its length how many of their tokens
count. Programs of one head take turns at stretches of the sequence, so that short and long ones are spread alike.
"""

import torch
import triton
import triton.language as tl

from greenroom.kernels.gpu.decode_attention import attend_block, merge_kernel, multiply

_STRETCH = 64
_MOST_STRETCHES = 32
_PROGRAMS = 1024
"""Enough to fill a large GPU."""


@triton.jit
def paged_attend_kernel(
    partial,
    stats,
    query,
    key,
    value,
    tables,
    lengths,
    scale,
    query_row,
    query_head,
    table_row,
    table_block,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    STRETCHES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_POW2: tl.constexpr,
    STRETCH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Grid (rows, key heads, STRETCHES).

    Args:
        partial: written: float32 [rows, key heads, STRETCHES, GROUP, VALUE_DIM], sums of each program.
        stats: written: float32 [rows, key heads, STRETCHES, GROUP, 2], maximum and sum of weights.
        query: [rows, key heads * GROUP, DIM], the last dimension contiguous.
        key, value: [blocks, BLOCK_SIZE, key heads, DIM or VALUE_DIM], contiguous.
        tables: integers [rows, W], blocks. lengths: integers [rows], tokens that the row sees, at least one.
        scale: factor on products.
        WINDOW: only so many of the last tokens are seen; 0 for all.
    """
    row, head, turn = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    key_heads = tl.num_programs(1)
    member = tl.arange(0, GROUP_POW2)
    dim = tl.arange(0, DIM_POW2)
    value_dim = tl.arange(0, VALUE_DIM_POW2)
    is_member = member < GROUP
    asked = tl.load(
        query + row * query_row + (head * GROUP + member)[:, None] * query_head + dim[None, :],
        mask=is_member[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    length = tl.load(lengths + row).to(tl.int32)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(length - WINDOW, 0)
    largest = tl.full((GROUP_POW2,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_POW2,), tl.float32)
    sums = tl.zeros((GROUP_POW2, VALUE_DIM_POW2), tl.float32)
    first = (lowest // STRETCH + turn) * STRETCH
    while first < length:
        position = first + tl.arange(0, STRETCH)
        # At least one token of every stretch is seen: the first one reaches beyond ``lowest``, all begin below length.
        seen = (position < length) & (position >= lowest)
        block = tl.load(tables + row * table_row + position // BLOCK_SIZE * table_block, mask=seen, other=0).to(
            tl.int64
        )
        place = (block * BLOCK_SIZE + position % BLOCK_SIZE) * key_heads + head
        keys = tl.load(key + place[None, :] * DIM + dim[:, None], mask=seen[None, :] & (dim < DIM)[:, None], other=0.0)
        values = tl.load(
            value + place[:, None] * VALUE_DIM + value_dim[None, :],
            mask=seen[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        products = multiply(asked, keys, WIDEN) * scale
        largest, total, sums = attend_block(products, values, seen, largest, total, sums, WIDEN)
        first += STRETCHES * STRETCH
    out = ((row * key_heads + head) * STRETCHES + turn) * GROUP + member
    tl.store(
        partial + out[:, None] * VALUE_DIM + value_dim[None, :],
        sums,
        mask=is_member[:, None] & (value_dim < VALUE_DIM)[None, :],
    )
    tl.store(stats + out * 2, largest, mask=is_member)
    tl.store(stats + out * 2 + 1, total, mask=is_member)


def paged_decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    block_size: int,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of one token of each sequence.

    Args:
        query: [1, Hq, n, D], the last dimension contiguous, Hq a multiple of Hk.
        key, value: [blocks * block_size, Hk, D or Dv], contiguous.
        tables: integers [n, W]: blocks of each sequence, at least as many as its length needs.
        lengths: integers [n]: tokens that each one sees, itself included; at least 1.
        scale: factor on products.
        window: only so many of the last tokens are seen.
        sinks: [Hq], logits of a place that takes weight and adds nothing.

    Returns:
        [1, n, Hq, Dv] of query's dtype.
    """
    _, heads, rows, dim = query.shape
    key_heads, value_dim = key.shape[1], value.shape[2]
    group = heads // key_heads
    most = triton.cdiv(tables.shape[1] * block_size, _STRETCH)
    stretches = min(most, _MOST_STRETCHES, max(4, triton.cdiv(_PROGRAMS, rows * key_heads)))
    entries = rows * key_heads * stretches * group
    partial = torch.empty(entries, value_dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(entries, 2, dtype=torch.float32, device=query.device)
    out = torch.empty(1, rows, heads, value_dim, dtype=query.dtype, device=query.device)
    paged_attend_kernel[(rows, key_heads, stretches)](
        partial,
        stats,
        query,
        key,
        value,
        tables,
        lengths,
        scale,
        query.stride(2),
        query.stride(1),
        tables.stride(0),
        tables.stride(1),
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        STRETCHES=stretches,
        GROUP=group,
        GROUP_POW2=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        DIM_POW2=max(16, triton.next_power_of_2(dim)),
        VALUE_DIM=value_dim,
        VALUE_DIM_POW2=max(16, triton.next_power_of_2(value_dim)),
        STRETCH=_STRETCH,
        WIDEN=query.device.type != "cuda",
    )
    merge_kernel[(rows * key_heads, group)](
        out,
        partial,
        stats,
        out if sinks is None else sinks,
        key_heads,
        STRETCHES=stretches,
        STRETCHES_POW2=triton.next_power_of_2(stretches),
        GROUP=group,
        VALUE_DIM=value_dim,
        VALUE_DIM_POW2=triton.next_power_of_2(value_dim),
        SINKS=sinks is not None,
    )
    return out
