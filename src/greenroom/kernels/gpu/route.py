"""A softmax router's choice in one kernel, where a model's own code takes half a dozen."""

import torch
import triton
import triton.language as tl


@triton.jit
def route_kernel(
    ids,
    weights,
    logits,
    EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_POW2: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Grid (tokens,). ids: written: int64 [tokens, TOP_K]; weights: written: [tokens, TOP_K], largest first.

    logits: [tokens, EXPERTS], contiguous. Of equal ones the expert with the lower number comes first.
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_POW2)
    place = tl.arange(0, TOP_K_POW2)
    inside = expert < EXPERTS
    value = tl.load(logits + token * EXPERTS + expert, mask=inside, other=float("-inf")).to(tl.float32)
    largest = tl.max(value, axis=0)
    share = tl.where(inside, tl.exp(value - largest), 0.0)
    share = share / tl.sum(share, axis=0)
    left = value
    chosen = tl.zeros((TOP_K_POW2,), tl.int64)
    weight = tl.zeros((TOP_K_POW2,), tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(tl.where(inside, left, float("-inf")), axis=0, tie_break_left=True)
        chosen = tl.where(place == k, best.to(tl.int64), chosen)
        weight = tl.where(place == k, tl.sum(tl.where(expert == best, share, 0.0), axis=0), weight)
        left = tl.where(expert == best, float("-inf"), left)
    if NORMALISE:
        weight = weight / tl.sum(weight, axis=0)
    tl.store(ids + token * TOP_K + place, chosen, mask=place < TOP_K)
    tl.store(weights + token * TOP_K + place, weight.to(weights.dtype.element_ty), mask=place < TOP_K)


def route(
    logits: torch.Tensor, top_k: int, *, normalise: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top_k`` largest of a softmax over experts.

    Args:
        logits: [T, E], contiguous.
        normalise: the chosen weights add up to 1.
        dtype: of the weights.

    Returns:
        ids int64 [T, top_k], weights [T, top_k], largest first.
    """
    tokens, experts = logits.shape
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=dtype, device=logits.device)
    if tokens:
        route_kernel[(tokens,)](
            ids,
            weights,
            logits,
            EXPERTS=experts,
            EXPERTS_POW2=triton.next_power_of_2(experts),
            TOP_K=top_k,
            TOP_K_POW2=triton.next_power_of_2(top_k),
            NORMALISE=normalise,
            num_warps=1,
        )
    return ids, weights
