"""Routed experts on the device, in torch's own operations.

Pairs (token, expert) are sorted once for all experts of a layer, so that a run of neighbouring experts finds its
pairs in one stretch of them: ``sort_pairs``, then ``add_group`` for each run. Large batches of BF16 go through the
library's grouped GEMM; what that does not take is computed expert by expert, which is also the slow and obvious
reference.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from greenroom.experts.activations import activate
from greenroom.experts.formats import ExpertFormat, ExpertViews

_GROUPED_ALIGNMENT = 8
"""BF16 values: the grouped GEMM wants rows on 16-byte boundaries."""

_GROUPED_CAPABILITIES = (9, 10)
"""Elsewhere torch computes a grouped GEMM one group at a time and reads the offsets back to the host first."""

_MAX_GROUPS = 1024


@dataclass(frozen=True)
class SortedPairs:
    """A layer's pairs in rising order of the place of their expert; pairs without a place come last.

    tokens: int64 [T * K], row of the pair's token. weights: float32 [T * K].
    """

    tokens: torch.Tensor
    weights: torch.Tensor


def sort_pairs(ids: torch.Tensor, weights: torch.Tensor, place: torch.Tensor) -> SortedPairs:
    """Nothing is read back to the host.

    Args:
        ids: int32 [T, K]; ids outside [0, experts) are skipped.
        weights: float32 [T, K].
        place: int32 [experts], a number of one's choice, -1 for experts that do not run here.
    """
    num_experts, top_k = place.shape[0], ids.shape[1]
    flat = ids.reshape(-1).long()
    inside = (flat >= 0) & (flat < num_experts)
    at = torch.where(inside, place[flat.clamp(0, num_experts - 1)], -1)
    nowhere = torch.iinfo(torch.int32).max
    # Stable: an expert's tokens stay in order.
    order = torch.argsort(torch.where(at < 0, nowhere, at), stable=True)
    return SortedPairs(order // top_k, weights.reshape(-1)[order])


def can_group(fmt: ExpertFormat, device: torch.device) -> bool:
    """Whether the library's grouped GEMM takes experts of this format on this device, without a wait."""
    if fmt.dtype != torch.bfloat16 or fmt.hidden % _GROUPED_ALIGNMENT or fmt.inter % _GROUPED_ALIGNMENT:
        return False
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in _GROUPED_CAPABILITIES


def add_group(
    out: torch.Tensor,
    hidden: torch.Tensor,
    pairs: SortedPairs,
    first: int,
    pairs_at: np.ndarray,
    ends: torch.Tensor,
    views: ExpertViews,
    fmt: ExpertFormat,
    grouped: bool,
) -> None:
    """Adds to ``out`` what the experts in ``views`` contribute to each token.

    Args:
        out: float32 [T, H], added to.
        hidden: [T, H] of the experts' dtype.
        pairs: of the whole layer.
        first: index of the first pair of these experts.
        pairs_at: int [N] on the host, pairs of each expert in ``views``, which may hold more than N.
        ends: int32 [N] on the device, their running sum.
        grouped: by the grouped GEMM, for formats that it takes.
    """
    total = int(pairs_at.sum())
    if total == 0:
        return
    if grouped and len(pairs_at) < _MAX_GROUPS:
        _add_grouped(out, hidden, pairs, slice(first, first + total), ends, views, fmt)
    else:
        _add_one_by_one(out, hidden, pairs, first, pairs_at, views, fmt)


def _add_grouped(
    out: torch.Tensor,
    hidden: torch.Tensor,
    pairs: SortedPairs,
    mine: slice,
    ends: torch.Tensor,
    views: ExpertViews,
    fmt: ExpertFormat,
) -> None:
    tokens, count = pairs.tokens[mine], len(ends)
    projected = _grouped_linear(hidden[tokens], views.up[:count], ends).float()
    if views.up_bias is not None:
        projected += views.up_bias[_expert_of_rows(ends, len(tokens))]
    rows = _grouped_linear(activate(projected, fmt).to(fmt.dtype), views.down[:count], ends)
    if views.down_bias is not None:
        rows = rows.float() + views.down_bias[_expert_of_rows(ends, len(tokens))]
    out.index_add_(0, tokens, rows * pairs.weights[mine].unsqueeze(1))  # the product is float32


def _grouped_linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[n, in] times [N, out, in], each row with the matrix of its group -> [n, out]."""
    return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)


def _expert_of_rows(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """int64 [rows]: the group that each row belongs to."""
    return torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)


def _add_one_by_one(
    out: torch.Tensor,
    hidden: torch.Tensor,
    pairs: SortedPairs,
    first: int,
    pairs_at: np.ndarray,
    views: ExpertViews,
    fmt: ExpertFormat,
) -> None:
    start = first
    for index, count in enumerate(pairs_at):
        if count == 0:
            continue
        mine = slice(start, start + int(count))
        start += int(count)
        rows = one_expert(hidden[pairs.tokens[mine]], index, views, fmt)
        out.index_add_(0, pairs.tokens[mine], rows.float() * pairs.weights[mine].unsqueeze(1))


def one_expert(rows: torch.Tensor, index: int, views: ExpertViews, fmt: ExpertFormat) -> torch.Tensor:
    """[n, H] -> [n, H] through the expert at ``index``; the activation is computed in float32."""
    up_bias = views.up_bias[index] if views.up_bias is not None else None
    down_bias = views.down_bias[index] if views.down_bias is not None else None
    projected = F.linear(rows, views.up[index], up_bias)
    inner = activate(projected.float(), fmt).to(rows.dtype)
    return F.linear(inner, views.down[index], down_bias)
