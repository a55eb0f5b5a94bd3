"""Many tokens' experts on a GPU: the library's grouped GEMM, and kernels of our own for what stands beside it.

Pairs (token, expert) are sorted once for all experts of a layer, so that a run of neighbouring experts finds its pairs
in one stretch of them. What the library does not take is computed by ``device_ffn``.
"""

import torch
import torch.nn.functional as F

from greenroom.experts.formats import ExpertFormat, ExpertViews
from greenroom.experts.grouping import Part
from greenroom.experts.tier import LayerBatch
from greenroom.kernels.gpu.expert_rows import activate_rows, add_rows
from greenroom.kernels.gpu.expert_sort import SortedPairs, sort_by_expert


class GroupedFfn:
    """One layer's experts in one step, group after group."""

    def __init__(self, batch: LayerBatch, fmt: ExpertFormat, num_experts: int, table: torch.Tensor) -> None:
        """
        Args:
            table: of the layer's ``Grouping``, on the batch's device.
        """
        self._batch = batch
        self._format = fmt
        self._ends = table[num_experts:]
        # There are hardly ever more places than two an expert. Always as many: fewer kernels to compile.
        num_places = max(2 * num_experts, len(self._ends))
        self._pairs = sort_by_expert(batch.ids, table[:num_experts], num_experts, num_places)

    def add(self, out: torch.Tensor, part: Part, views: ExpertViews) -> None:
        """Adds to ``out`` (float32 [T, H]) what the experts of ``part``, the first ones in ``views``, contribute."""
        total = int(part.pairs_at.sum())
        if total == 0:
            return
        mine = slice(part.first_pair, part.first_pair + total)
        ends = self._ends[part.first_place : part.first_place + len(part.pairs_at)]
        _run(out, self._batch, self._pairs, mine, part.first_place, ends, views, self._format, onto=True)


def run_all(batch: LayerBatch, fmt: ExpertFormat, views: ExpertViews) -> torch.Tensor:
    """[T, H] of hidden's dtype: all experts of a layer, which lie in ``views`` in their order. Without the host."""
    experts = len(views.up)
    pairs = sort_by_expert(batch.ids, None, experts, experts)
    out = torch.empty_like(batch.hidden)
    _run(out, batch, pairs, slice(0, batch.ids.numel()), 0, pairs.ends, views, fmt, onto=False)
    return out


def _run(
    out: torch.Tensor,
    batch: LayerBatch,
    pairs: SortedPairs,
    mine: slice,
    first_place: int,
    ends: torch.Tensor,
    views: ExpertViews,
    fmt: ExpertFormat,
    onto: bool,
) -> None:
    """Writes or adds what the sorted pairs ``mine`` contribute, of experts whose places begin at ``first_place``.

    Behind the last of ``ends`` rows are undefined; no token has its position there.
    """
    count, activation = len(ends), fmt.activation
    projected = _grouped_linear(batch.hidden[pairs.tokens[mine]], views.up[:count], ends)
    inner = activate_rows(
        projected,
        pairs.places,
        mine.start,
        first_place,
        views.up_bias,
        fmt.inter,
        int(activation.kind),
        activation.alpha,
        activation.limit,
    )
    rows = _grouped_linear(inner, views.down[:count], ends)
    add_rows(
        out,
        rows,
        pairs.positions,
        batch.weights,
        pairs.places,
        mine.start,
        first_place,
        views.down_bias,
        onto,
    )


def _grouped_linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[n, in] times [N, out, in], each row with the matrix of its group -> [n, out]."""
    return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
