"""Experts of a small batch on the GPU, each wherever its block lies: a slot, or host memory read over PCIe.

Each program reads its rows of one expert's weights once, for all tokens of the batch. Tokens that did not choose
the expert are not read; that they take part as zeros hides behind the weights' bytes up to some dozens of tokens.
A batch of one takes products and sums instead of matrix units, which could not fill a tile.

An address from memory says nothing of its alignment, so the kernels do: else weights would be read two bytes at a time,
and none ahead.
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
def _pairs_of(gpu_ids, expert, TOKENS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """(pair numbers, whether each is ``expert``'s): [BLOCK_TOKENS, TOP_K rounded up to a power of two] each."""
    token = tl.arange(0, BLOCK_TOKENS)[:, None]
    choice = tl.arange(0, triton.next_power_of_2(TOP_K))[None, :]
    pair = token * TOP_K + choice
    chosen = tl.load(gpu_ids + pair, mask=(token < TOKENS) & (choice < TOP_K), other=-1)
    return pair, chosen == expert


@triton.jit
def _rows_of(matrix, row_start, column, inside):
    return tl.load(matrix + row_start + column[None, :], mask=inside, other=0.0)


@triton.jit
def _tokens_of(batch, column, inside, mine, WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """[columns, BLOCK_TOKENS]; zeros for tokens that are not ``mine``, which are not read."""
    token = tl.arange(0, BLOCK_TOKENS)
    return tl.load(batch + token[None, :] * WIDTH + column[:, None], mask=inside[:, None] & mine[None, :], other=0.0)


@triton.jit
def _rows_times_batch(
    matrix,
    second,
    batch,
    mine,
    first_row,
    num_rows,
    width,
    WIDTH: tl.constexpr,
    TWO: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Rows from ``first_row`` of ``matrix`` [num_rows, WIDTH], and of ``second`` if there are TWO, times ``batch``
    [tokens, WIDTH] transposed, over the first ``width`` columns.

    Returns:
        (float32 [BLOCK_ROWS, BLOCK_TOKENS], the same of ``second``). Tokens that are not ``mine`` get zeros.
    """
    row = first_row + tl.arange(0, BLOCK_ROWS)
    row_start = row.to(tl.int64)[:, None] * WIDTH
    row_inside = row[:, None] < num_rows
    if BLOCK_TOKENS == 1:
        sums = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
        second_sums = sums
        # Unrolled, so that all loads are under way at once.
        for first in tl.static_range(0, WIDTH, BLOCK_WIDTH):
            column = first + tl.arange(0, BLOCK_WIDTH)
            inside = column < width
            tile_inside = row_inside & inside[None, :]
            value = tl.load(batch + column, mask=inside, other=0.0).to(tl.float32)[None, :]
            sums += _rows_of(matrix, row_start, column, tile_inside).to(tl.float32) * value
            if TWO:
                second_sums += _rows_of(second, row_start, column, tile_inside).to(tl.float32) * value
        return tl.sum(sums, axis=1)[:, None], tl.sum(second_sums, axis=1)[:, None]
    else:
        sums = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
        second_sums = sums
        for first in tl.range(0, WIDTH, BLOCK_WIDTH):
            column = first + tl.arange(0, BLOCK_WIDTH)
            inside = column < width
            tile_inside = row_inside & inside[None, :]
            values = _tokens_of(batch, column, inside, mine, WIDTH, BLOCK_TOKENS)
            tile = _rows_of(matrix, row_start, column, tile_inside)
            if WIDEN:
                tile, values = tile.to(tl.float32), values.to(tl.float32)
            sums = tl.dot(tile, values, sums, input_precision="ieee")
            if TWO:
                tile = _rows_of(second, row_start, column, tile_inside)
                if WIDEN:
                    tile = tile.to(tl.float32)
                second_sums = tl.dot(tile, values, second_sums, input_precision="ieee")
        return sums, second_sums


@triton.jit
def up_kernel(
    act,
    hidden,
    gpu_ids,
    entry_address,
    entry_expert,
    entry_rows,
    entry_num,
    up_offset,
    bias_offset,
    alpha,
    limit,
    TOKENS: tl.constexpr,
    TOP_K: tl.constexpr,
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
        act: written for tokens that chose the entry's expert: [entries, TOKENS, INTER] of the experts' dtype.
        hidden: [TOKENS, HIDDEN] of the experts' dtype.
        gpu_ids: int32 [TOKENS, TOP_K].
        entry_address, entry_expert, entry_rows, entry_num: the experts to compute, as the dispatch kernel lists them.
        up_offset, bias_offset: bytes from an expert's block to its first projection and that one's bias.
        alpha, limit: of the activation.
        PART: which entries.
        WIDEN: feed matrix units float32; for Triton's interpreter, which multiplies no bfloat16.
    """
    entry, end = _choose_entry(entry_num, PART)
    first_row = tl.program_id(0) * BLOCK_ROWS
    if (entry < end) & (first_row < tl.load(entry_rows + entry, mask=entry < end, other=0)):
        block = tl.load(entry_address + entry)
        _, chosen = _pairs_of(gpu_ids, tl.load(entry_expert + entry), TOKENS, TOP_K, BLOCK_TOKENS)
        mine = tl.max(chosen.to(tl.int32), axis=1) > 0
        dtype = hidden.dtype.element_ty
        matrix = tl.multiple_of((block + up_offset).to(tl.pointer_type(dtype)), 16)
        bias = (block + bias_offset).to(tl.pointer_type(dtype))
        row = first_row + tl.arange(0, BLOCK_ROWS)
        inside = row < INTER
        gate, up = _rows_times_batch(
            matrix,
            matrix + INTER * HIDDEN,
            hidden,
            mine,
            first_row,
            INTER,
            HIDDEN,
            HIDDEN,
            GATED,
            BLOCK_ROWS,
            BLOCK_TOKENS,
            BLOCK_WIDTH,
            WIDEN,
        )
        if BIAS:
            gate += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            if BIAS:
                up += tl.load(bias + INTER + row, mask=inside, other=0.0).to(tl.float32)[:, None]
            value = gated(gate, up, alpha, limit, KIND, CLAMPED)
        else:
            value = ungated(gate, alpha, limit, KIND, CLAMPED)
        token = tl.arange(0, BLOCK_TOKENS)
        tl.store(
            act + (entry * TOKENS + token[None, :]) * INTER + row[:, None],
            value.to(dtype),
            mask=inside[:, None] & mine[None, :],
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
        inner = tl.load(entry_rows + entry)
        if INTER % 16 == 0:
            inner = tl.multiple_of(inner, 16)  # divided experts' rows come so
        # All of the batch's choices at once and in front of the weights: read behind them, one after another, they
        # would take longer than the weights.
        pair, chosen = _pairs_of(gpu_ids, tl.load(entry_expert + entry), TOKENS, TOP_K, BLOCK_TOKENS)
        mine = tl.max(chosen.to(tl.int32), axis=1) > 0
        weight = tl.load(weights + pair, mask=chosen, other=0.0).to(tl.float32)
        dtype = act.dtype.element_ty
        matrix = tl.multiple_of((block + down_offset).to(tl.pointer_type(dtype)), 16)
        first_row = tl.program_id(0) * BLOCK_ROWS
        row = first_row + tl.arange(0, BLOCK_ROWS)
        inside = row < HIDDEN
        value, _ = _rows_times_batch(
            matrix,
            matrix,
            act + entry * TOKENS * INTER,
            mine,
            first_row,
            HIDDEN,
            inner,
            INTER,
            False,
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
        tl.store(
            partial + pair.to(tl.int64)[None, :, :] * HIDDEN + row[:, None, None],
            value[:, :, None] * weight[None, :, :],
            mask=inside[:, None, None] & chosen[None, :, :],
        )
        if TIMED:
            if entry < tl.load(entry_num + 1):
                tl.atomic_max(spans + 1, globaltimer(), sem="relaxed")
