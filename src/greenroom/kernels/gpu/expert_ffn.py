"""Experts of a small batch on the GPU, each wherever its block lies: a slot, or host memory read over PCIe.

Each program reads its rows of one expert's weights once, for all tokens of the batch. Arithmetic on tokens
that did not choose the expert is thrown away: it hides behind the weights' bytes up to some dozens of tokens.
A batch of one takes products and sums instead of matrix units, which could not fill a tile.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from greenroom.kernels.gpu.activations import gated, ungated

# Which entries a launch computes.
ALL = tl.constexpr(0)
RESIDENT = tl.constexpr(1)
CROSSING = tl.constexpr(2)


@triton.jit
def _choose_entry(entry_num, PART: tl.constexpr):
    """This program's entry, and the end of those that the launch computes."""
    if PART == RESIDENT:
        return tl.load(entry_num + 1) + tl.program_id(1), tl.load(entry_num)
    elif PART == CROSSING:
        return tl.program_id(1), tl.load(entry_num + 1)
    else:
        return tl.program_id(1), tl.load(entry_num)


@triton.jit
def _rows_times_batch(
    matrix,
    batch,
    first_row,
    num_rows,
    width,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """float32 [BLOCK_ROWS, BLOCK_TOKENS]: rows from ``first_row`` of ``matrix`` [num_rows, WIDTH] times
    ``batch`` [TOKENS, WIDTH] transposed, over the first ``width`` columns."""
    row = first_row + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    row_start = matrix + row.to(tl.int64)[:, None] * WIDTH
    row_inside = row[:, None] < num_rows
    if BLOCK_TOKENS == 1:
        products = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
        for first in tl.range(0, WIDTH, BLOCK_WIDTH):
            inside = first + column < width
            tile = tl.load(row_start + first + column[None, :], mask=row_inside & inside[None, :], other=0.0)
            value = tl.load(batch + first + column, mask=inside, other=0.0)
            products += tile.to(tl.float32) * value.to(tl.float32)[None, :]
        return tl.sum(products, axis=1)[:, None]
    else:
        token = tl.arange(0, BLOCK_TOKENS)
        sums = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
        for first in tl.range(0, WIDTH, BLOCK_WIDTH):
            inside = first + column < width
            tile = tl.load(row_start + first + column[None, :], mask=row_inside & inside[None, :], other=0.0)
            values = tl.load(
                batch + token[None, :] * WIDTH + (first + column)[:, None],
                mask=(token[None, :] < TOKENS) & inside[:, None],
                other=0.0,
            )
            if WIDEN:
                tile, values = tile.to(tl.float32), values.to(tl.float32)
            sums = tl.dot(tile, values, sums, input_precision="ieee")
        return sums


@triton.jit
def up_kernel(
    act,
    hidden,
    entry_address,
    entry_rows,
    entry_num,
    up_offset,
    bias_offset,
    alpha,
    limit,
    TOKENS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """First projection and activation. Grid (cdiv(INTER, BLOCK_ROWS), entries).

    Args:
        act: written: [entries, TOKENS, INTER] of the experts' dtype.
        hidden: [TOKENS, HIDDEN] of the experts' dtype.
        entry_address, entry_rows, entry_num: the experts to compute, as the dispatch kernel lists them.
        up_offset, bias_offset: bytes from an expert's block to its first projection and that one's bias.
        alpha, limit: of the activation.
        PART: which entries.
        WIDEN: feed matrix units float32; for Triton's interpreter, which multiplies no bfloat16.
    """
    entry, end = _choose_entry(entry_num, PART)
    first_row = tl.program_id(0) * BLOCK_ROWS
    if (entry < end) & (first_row < tl.load(entry_rows + entry, mask=entry < end, other=0)):
        block = tl.load(entry_address + entry)
        dtype = hidden.dtype.element_ty
        matrix = (block + up_offset).to(tl.pointer_type(dtype))
        bias = (block + bias_offset).to(tl.pointer_type(dtype))
        row = first_row + tl.arange(0, BLOCK_ROWS)
        inside = row < INTER
        gate = _rows_times_batch(
            matrix, hidden, first_row, INTER, HIDDEN, TOKENS, HIDDEN, BLOCK_ROWS, BLOCK_TOKENS, BLOCK_WIDTH, WIDEN
        )
        if BIAS:
            gate += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up = _rows_times_batch(
                matrix + INTER * HIDDEN,
                hidden,
                first_row,
                INTER,
                HIDDEN,
                TOKENS,
                HIDDEN,
                BLOCK_ROWS,
                BLOCK_TOKENS,
                BLOCK_WIDTH,
                WIDEN,
            )
            if BIAS:
                up += tl.load(bias + INTER + row, mask=inside, other=0.0).to(tl.float32)[:, None]
            value = gated(gate, up, alpha, limit, KIND, CLAMPED)
        else:
            value = ungated(gate, alpha, limit, KIND, CLAMPED)
        token = tl.arange(0, BLOCK_TOKENS)
        tl.store(
            act + (entry * TOKENS + token[None, :]) * INTER + row[:, None],
            value.to(dtype),
            mask=inside[:, None] & (token[None, :] < TOKENS),
        )


@triton.jit
def down_kernel(
    partial,
    act,
    gpu_ids,
    weights,
    entry_address,
    entry_expert,
    entry_rows,
    entry_num,
    spans,
    down_offset,
    bias_offset,
    TOKENS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    BIAS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    WIDEN: tl.constexpr,
    TIMED: tl.constexpr,
):
    """Second projection, weighted. Grid (cdiv(HIDDEN, BLOCK_ROWS), entries).

    Args:
        partial: written where ``gpu_ids`` names an entry: float32 [TOKENS, TOP_K, HIDDEN].
        act: [entries, TOKENS, INTER] of the experts' dtype.
        gpu_ids, weights: int32 and floats [TOKENS, TOP_K].
        entry_address, entry_expert, entry_rows, entry_num: as the dispatch kernel lists them.
        spans: int64 [>= 3], the device's clock; the second becomes the end of the last streamed expert.
        down_offset, bias_offset: bytes from an expert's block to its second projection and that one's bias.
    """
    entry, end = _choose_entry(entry_num, PART)
    if entry < end:
        block = tl.load(entry_address + entry)
        expert = tl.load(entry_expert + entry)
        inner = tl.load(entry_rows + entry)
        dtype = act.dtype.element_ty
        matrix = (block + down_offset).to(tl.pointer_type(dtype))
        first_row = tl.program_id(0) * BLOCK_ROWS
        row = first_row + tl.arange(0, BLOCK_ROWS)
        inside = row < HIDDEN
        value = _rows_times_batch(
            matrix,
            act + entry * TOKENS * INTER,
            first_row,
            HIDDEN,
            inner,
            TOKENS,
            INTER,
            BLOCK_ROWS,
            BLOCK_TOKENS,
            BLOCK_WIDTH,
            WIDEN,
        )
        if BIAS:
            bias = (block + bias_offset).to(tl.pointer_type(dtype))
            # Whoever has a divided expert's last row adds the bias, and that is the CPU.
            whole = inside & (inner == INTER)
            value += tl.load(bias + row, mask=whole, other=0.0).to(tl.float32)[:, None]
        token = tl.arange(0, BLOCK_TOKENS)
        for k in tl.static_range(TOP_K):
            pair = token * TOP_K + k
            mine = (token < TOKENS) & (tl.load(gpu_ids + pair, mask=token < TOKENS, other=-1) == expert)
            weight = tl.load(weights + pair, mask=mine, other=0.0).to(tl.float32)
            tl.store(
                partial + pair[None, :].to(tl.int64) * HIDDEN + row[:, None],
                value * weight[None, :],
                mask=inside[:, None] & mine[None, :],
            )
        if TIMED:
            if entry < tl.load(entry_num + 1):
                tl.atomic_max(spans + 1, globaltimer(), sem="relaxed")
