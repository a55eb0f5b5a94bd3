"""Routed experts on the device one by one, in torch's own operations: the slow and obvious reference of
``grouped_ffn``, for whatever that does not take."""

import torch
import torch.nn.functional as F

from greenroom.experts.activations import activate
from greenroom.experts.formats import ExpertFormat, ExpertViews
from greenroom.experts.grouping import Part
from greenroom.experts.tier import LayerBatch

_GROUPED_ALIGNMENT = 8
"""BF16 values: the grouped GEMM wants rows on 16-byte boundaries."""

_GROUPED_CAPABILITIES = (9, 10)
"""Elsewhere torch computes a grouped GEMM one group at a time and reads the offsets back to the host first."""

_MAX_GROUPS = 1023
"""Of the library in one product."""


def can_group(fmt: ExpertFormat, num_experts: int, device: torch.device) -> bool:
    """Whether the library's grouped GEMM takes so many experts of this format on this device, without a wait."""
    if (
        fmt.dtype != torch.bfloat16
        or fmt.hidden % _GROUPED_ALIGNMENT
        or fmt.inter % _GROUPED_ALIGNMENT
        or num_experts > _MAX_GROUPS
    ):
        return False
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in _GROUPED_CAPABILITIES


class OneByOneFfn:
    """One layer's experts in one step, group after group.

    Pairs (token, expert) are sorted once, so that an expert finds its own in one stretch of them.
    """

    def __init__(self, batch: LayerBatch, fmt: ExpertFormat, num_experts: int, table: torch.Tensor) -> None:
        """
        Args:
            table: of the layer's ``Grouping``, on the batch's device.
        """
        self._batch = batch
        self._format = fmt
        self._tokens, self._weights = sort_pairs(batch.ids, batch.weights, table[:num_experts])

    def add(self, out: torch.Tensor, part: Part, views: ExpertViews) -> None:
        """Adds to ``out`` (float32 [T, H]) what the experts of ``part``, the first ones in ``views``, contribute."""
        start = part.first_pair
        for index, count in enumerate(part.pairs_at.tolist()):
            if count == 0:
                continue
            mine = slice(start, start + count)
            start += count
            tokens = self._tokens[mine]
            rows = one_expert(self._batch.hidden[tokens], index, views, self._format)
            out.index_add_(0, tokens, rows.float() * self._weights[mine].unsqueeze(1))


def sort_pairs(ids: torch.Tensor, weights: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's pairs in rising order of the place of their expert; pairs without a place come last.

    Args:
        ids: int32 [T, K]; ids outside [0, experts) are skipped.
        weights: float32 [T, K].
        place: int32 [experts], a number of one's choice, -1 for experts that do not run here.

    Returns:
        tokens int64 [T * K], row of each pair's token; weights float32 [T * K].
    """
    num_experts, top_k = place.shape[0], ids.shape[1]
    flat = ids.reshape(-1).long()
    inside = (flat >= 0) & (flat < num_experts)
    at = torch.where(inside, place[flat.clamp(0, num_experts - 1)], -1)
    nowhere = torch.iinfo(torch.int32).max
    # Stable: an expert's tokens stay in order.
    order = torch.argsort(torch.where(at < 0, nowhere, at), stable=True)
    return order // top_k, weights.reshape(-1)[order]


def one_expert(rows: torch.Tensor, index: int, views: ExpertViews, fmt: ExpertFormat) -> torch.Tensor:
    """[n, H] -> [n, H] through the expert at ``index``; the activation is computed in float32."""
    up_bias = views.up_bias[index] if views.up_bias is not None else None
    down_bias = views.down_bias[index] if views.down_bias is not None else None
    projected = F.linear(rows, views.up[index], up_bias)
    inner = activate(projected.float(), fmt).to(rows.dtype)
    return F.linear(inner, views.down[index], down_bias)
