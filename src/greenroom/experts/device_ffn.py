"""Routed experts on the device, in plain torch: exact, and what faster kernels are held against."""

import numpy as np
import torch
import torch.nn.functional as F

from greenroom.experts.activations import activate
from greenroom.experts.formats import ExpertFormat, ExpertViews


def add_experts(
    out: torch.Tensor,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    position: torch.Tensor,
    pairs_at: np.ndarray,
    views: ExpertViews,
    fmt: ExpertFormat,
) -> None:
    """Adds to ``out`` what the experts in ``views`` contribute to each token.

    Nothing is read back: the host knows how many pairs each position has, the device sorts them.

    Args:
        out: float32 [T, H], added to.
        hidden: [T, H] of the experts' dtype.
        ids: int32 [T, K]; ids outside [0, experts) are skipped.
        weights: float32 [T, K].
        position: int32 [experts], where in ``views`` an expert lies, -1 if it is not there.
        pairs_at: int [N] on the host, pairs of each position. N may be less than the views hold.
        views: weights of at least N experts.
        fmt: their format.
    """
    num_experts, top_k = position.shape[0], ids.shape[1]
    flat = ids.reshape(-1).long()
    inside = (flat >= 0) & (flat < num_experts)
    at = torch.where(inside, position[flat.clamp(0, num_experts - 1)], -1)
    order = torch.argsort(torch.where(at < 0, len(pairs_at), at), stable=True)
    pair_weights = weights.reshape(-1)
    start = 0
    for index, count in enumerate(pairs_at):
        if count == 0:
            continue
        chosen = order[start : start + int(count)]
        start += int(count)
        tokens = chosen // top_k
        rows = one_expert(hidden[tokens], index, views, fmt)
        out.index_add_(0, tokens, rows.float() * pair_weights[chosen].unsqueeze(1))


def one_expert(rows: torch.Tensor, index: int, views: ExpertViews, fmt: ExpertFormat) -> torch.Tensor:
    """[n, H] -> [n, H] through the expert at ``index``; the activation is computed in float32."""
    up_bias = views.up_bias[index] if views.up_bias is not None else None
    down_bias = views.down_bias[index] if views.down_bias is not None else None
    projected = F.linear(rows, views.up[index], up_bias)
    inner = activate(projected.float(), fmt).to(rows.dtype)
    return F.linear(inner, views.down[index], down_bias)
