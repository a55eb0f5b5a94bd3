"""Latent attention of one new token a sequence over blocks that hold one latent and one rotated key a token.

Every head's key is a projection of the latent, beside the rotated key that all share; its value is another
projection. Both can be moved to the other side: what the queries are multiplied with is the latent itself, and so
is what the weights add up. So a token is read once for all heads, and nothing is expanded.
"""

import torch
import triton
import triton.language as tl

from greenroom.kernels.gpu.decode_attention import attend_block, merge_kernel, multiply

_STRETCH = 32
_MOST_STRETCHES = 32
_PROGRAMS = 1024
_MOST_HEADS = 16
"""Of one program: its sums take registers."""


@triton.jit
def latent_attend_kernel(
    partial,
    stats,
    query,
    rotated_query,
    latent,
    rotated,
    tables,
    lengths,
    scale,
    query_row,
    query_head,
    rotated_row,
    rotated_head,
    table_row,
    table_block,
    BLOCK_SIZE: tl.constexpr,
    STRETCHES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    RANK: tl.constexpr,
    RANK_POW2: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTATED_POW2: tl.constexpr,
    STRETCH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Grid (rows, groups of heads, STRETCHES).

    Args:
        partial: written: float32 [rows, groups, STRETCHES, GROUP, RANK], sums of each program.
        stats: written: float32 [rows, groups, STRETCHES, GROUP, 2], maximum and sum of weights.
        query: [rows, groups * GROUP, RANK]; rotated_query: [rows, groups * GROUP, ROTATED].
            The last dimension of both is contiguous.
        latent, rotated: [blocks, BLOCK_SIZE, RANK or ROTATED], contiguous.
        tables: integers [rows, W], blocks. lengths: integers [rows], tokens that the row sees, at least one.
        scale: factor on products.
    """
    row, group, turn = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    member = tl.arange(0, GROUP_POW2)
    rank = tl.arange(0, RANK_POW2)
    dim = tl.arange(0, ROTATED_POW2)
    is_member = member < GROUP
    head = group * GROUP + member
    asked = tl.load(
        query + row * query_row + head[:, None] * query_head + rank[None, :],
        mask=is_member[:, None] & (rank < RANK)[None, :],
        other=0.0,
    )
    asked_rotated = tl.load(
        rotated_query + row * rotated_row + head[:, None] * rotated_head + dim[None, :],
        mask=is_member[:, None] & (dim < ROTATED)[None, :],
        other=0.0,
    )
    length = tl.load(lengths + row).to(tl.int32)
    largest = tl.full((GROUP_POW2,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_POW2,), tl.float32)
    sums = tl.zeros((GROUP_POW2, RANK_POW2), tl.float32)
    first = turn * STRETCH
    while first < length:
        position = first + tl.arange(0, STRETCH)
        seen = position < length
        block = tl.load(tables + row * table_row + position // BLOCK_SIZE * table_block, mask=seen, other=0).to(
            tl.int64
        )
        place = block * BLOCK_SIZE + position % BLOCK_SIZE
        latents = tl.load(
            latent + place[:, None] * RANK + rank[None, :], mask=seen[:, None] & (rank < RANK)[None, :], other=0.0
        )
        keys = tl.load(
            rotated + place[None, :] * ROTATED + dim[:, None], mask=seen[None, :] & (dim < ROTATED)[:, None], other=0.0
        )
        products = multiply(asked, tl.trans(latents), WIDEN) + multiply(asked_rotated, keys, WIDEN)
        largest, total, sums = attend_block(products * scale, latents, seen, largest, total, sums, WIDEN)
        first += STRETCHES * STRETCH
    out = ((row * tl.num_programs(1) + group) * STRETCHES + turn) * GROUP + member
    tl.store(partial + out[:, None] * RANK + rank[None, :], sums, mask=is_member[:, None] & (rank < RANK)[None, :])
    tl.store(stats + out * 2, largest, mask=is_member)
    tl.store(stats + out * 2 + 1, total, mask=is_member)


def latent_decode_attention(
    query: torch.Tensor,
    rotated_query: torch.Tensor,
    latent: torch.Tensor,
    rotated: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """Softmax attention of one token of each sequence, in the space of latents.

    Args:
        query: [H, n, R], multiplied by the keys' projection already; rotated_query: [H, n, D].
            The last dimension of both contiguous.
        latent: [blocks * block_size, 1, R]; rotated: [blocks * block_size, 1, D]; contiguous.
        tables: integers [n, W]: blocks of each sequence, at least as many as its length needs.
        lengths: integers [n]: tokens that each one sees, itself included; at least 1.
        scale: factor on products.

    Returns:
        [n, H, R] of query's dtype: sums of latents, to be multiplied by the values' projection.
    """
    heads, rows, rank = query.shape
    dim = rotated_query.shape[2]
    group = next(size for size in range(min(heads, _MOST_HEADS), 0, -1) if heads % size == 0)
    groups = heads // group
    most = triton.cdiv(tables.shape[1] * block_size, _STRETCH)
    stretches = min(most, _MOST_STRETCHES, max(4, triton.cdiv(_PROGRAMS, rows * groups)))
    entries = rows * groups * stretches * group
    partial = torch.empty(entries, rank, dtype=torch.float32, device=query.device)
    stats = torch.empty(entries, 2, dtype=torch.float32, device=query.device)
    out = torch.empty(rows, heads, rank, dtype=query.dtype, device=query.device)
    latent_attend_kernel[(rows, groups, stretches)](
        partial,
        stats,
        query,
        rotated_query,
        latent,
        rotated,
        tables,
        lengths,
        scale,
        query.stride(1),
        query.stride(0),
        rotated_query.stride(1),
        rotated_query.stride(0),
        tables.stride(0),
        tables.stride(1),
        BLOCK_SIZE=block_size,
        STRETCHES=stretches,
        GROUP=group,
        GROUP_POW2=max(16, triton.next_power_of_2(group)),
        RANK=rank,
        RANK_POW2=max(16, triton.next_power_of_2(rank)),
        ROTATED=dim,
        ROTATED_POW2=max(16, triton.next_power_of_2(dim)),
        STRETCH=_STRETCH,
        WIDEN=query.device.type != "cuda",
    )
    merge_kernel[(rows * groups, group)](
        out,
        partial,
        stats,
        out,
        groups,
        STRETCHES=stretches,
        STRETCHES_POW2=triton.next_power_of_2(stretches),
        GROUP=group,
        VALUE_DIM=rank,
        VALUE_DIM_POW2=triton.next_power_of_2(rank),
        SINKS=False,
        num_warps=8,
    )
    return out
