"""What stands beside the grouped products of many tokens' experts: the activation, and the weighted sum of rows."""

import torch
import triton
import triton.language as tl

from greenroom.kernels.gpu.activations import gated, ungated


@triton.jit(do_not_specialize=["first", "first_place"])
def activate_rows_kernel(
    out,
    projected,
    places,
    bias,
    first,
    first_place,
    bias_pitch,
    alpha,
    limit,
    INTER: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows, cdiv(INTER, BLOCK)).

    Args:
        out: written: [rows, INTER].
        projected: [rows, INTER], or [rows, 2 * INTER] if GATED: gates, then the others.
        places: int32, of each sorted pair, of which the rows are those from ``first`` on: which expert's bias.
        bias: [experts, projected's width], ``bias_pitch`` from one to the next; of the experts from ``first_place`` on.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INTER
    width: tl.constexpr = 2 * INTER if GATED else INTER
    at = projected + row * width + column
    leading = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    its_bias = bias
    if BIAS:
        its_bias += (tl.load(places + first + row) - first_place).to(tl.int64) * bias_pitch + column
        leading += tl.load(its_bias, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        second = tl.load(at + INTER, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            second += tl.load(its_bias + INTER, mask=inside, other=0.0).to(tl.float32)
        inner = gated(leading, second, alpha, limit, KIND, CLAMPED)
    else:
        inner = ungated(leading, alpha, limit, KIND, CLAMPED)
    tl.store(out + row * INTER + column, inner.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "last", "first_place"])
def add_rows_kernel(
    out,
    rows,
    positions,
    weights,
    places,
    bias,
    first,
    last,
    first_place,
    bias_pitch,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    BIAS: tl.constexpr,
    ONTO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (tokens, cdiv(HIDDEN, BLOCK)). A token's rows are added in the order of its choices, in float32.

    Args:
        out: [tokens, HIDDEN]: written, or added to if ONTO.
        rows: [last - first, HIDDEN], outputs of the sorted pairs from ``first`` up to ``last``.
        positions: int32 [tokens, TOP_K], where each pair lies among the sorted; -1 for nowhere.
        weights: floats [tokens, TOP_K].
        places: int32, of each sorted pair: which expert's bias.
        bias: [experts, HIDDEN] as for ``activate_rows_kernel``.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    total = tl.zeros((BLOCK,), tl.float32)
    found = 0
    for k in tl.static_range(TOP_K):
        position = tl.load(positions + token * TOP_K + k)
        here = (position >= first) & (position < last)
        found += here.to(tl.int32)
        row = rows + (position - first).to(tl.int64) * HIDDEN + column
        value = tl.load(row, mask=inside & here, other=0.0).to(tl.float32)
        if BIAS:
            place = tl.load(places + position, mask=here, other=0) - first_place
            value += tl.load(bias + place.to(tl.int64) * bias_pitch + column, mask=inside & here, other=0.0).to(
                tl.float32
            )
        total += value * tl.load(weights + token * TOP_K + k).to(tl.float32)
    at = out + token * HIDDEN + column
    if ONTO:
        if found > 0:
            tl.store(at, tl.load(at, mask=inside) + total, mask=inside)
    else:
        tl.store(at, total.to(out.dtype.element_ty), mask=inside)


def block_of(width: int) -> int:
    """Columns of one program."""
    return min(triton.next_power_of_2(width), 1024)


def activate_rows(
    projected: torch.Tensor,
    places: torch.Tensor,
    first: int,
    first_place: int,
    bias: torch.Tensor | None,
    inter: int,
    kind: int,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """[n, 2 * inter] or [n, inter], contiguous -> [n, inter]: bias and activation, computed in float32.

    Args:
        places: int32 [pairs], of the whole layer: which expert's bias.
        first: which sorted pair the first row belongs to.
        bias: [experts, projected's width], rows contiguous, counting from ``first_place``.
        kind: of ``ActivationKind``, with its ``alpha`` and ``limit``.
    """
    count, width = projected.shape
    out = projected.new_empty(count, inter)
    block = block_of(inter)
    activate_rows_kernel[(count, triton.cdiv(inter, block))](
        out,
        projected,
        places,
        bias if bias is not None else projected,
        first,
        first_place,
        bias.stride(0) if bias is not None else 0,
        alpha,
        limit,
        INTER=inter,
        KIND=kind,
        GATED=width != inter,
        BIAS=bias is not None,
        CLAMPED=limit != float("inf"),
        BLOCK=block,
    )
    return out


def add_rows(
    out: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor,
    places: torch.Tensor,
    first: int,
    first_place: int,
    bias: torch.Tensor | None,
    onto: bool,
) -> None:
    """Adds each token's rows, times their weights, to ``out``; or without ``onto`` writes the sums there.

    Args:
        out: [T, H], contiguous; float32 if ``onto``.
        rows: [n, H], contiguous, of the sorted pairs from ``first`` on.
        positions: int32 [T, K]; weights: floats [T, K]; places: int32 [pairs]: of the whole layer.
        bias: [experts, H], rows contiguous, counting from ``first_place``.
    """
    (tokens, top_k), hidden = positions.shape, rows.shape[1]
    block = block_of(hidden)
    add_rows_kernel[(tokens, triton.cdiv(hidden, block))](
        out,
        rows,
        positions,
        weights,
        places,
        bias if bias is not None else rows,
        first,
        first + len(rows),
        first_place,
        bias.stride(0) if bias is not None else 0,
        TOP_K=top_k,
        HIDDEN=hidden,
        BIAS=bias is not None,
        ONTO=onto,
        BLOCK=block,
    )
