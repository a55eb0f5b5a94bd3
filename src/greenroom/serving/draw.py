"""draw: tokens by the probability of their scores, after top-k, top-p (of what top-k left) and min-p, on either device.

Neither a sort nor a running sum goes over a whole vocabulary. A cut orders the likeliest tokens alone, and says where
those do not decide it; a draw without cuts finds its block of tokens before its token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_BLOCK = 512
"""Tokens of one sum."""


@dataclass(frozen=True)
class Wish:
    """How one row's token is drawn: ``number`` in [0, 1) picks it. The others are as in ``SamplingParams``."""

    number: float
    temperature: float
    top_k: int
    top_p: float
    min_p: float


@dataclass(frozen=True)
class _Table:
    """Wishes on the device, float64 [rows, 1] or bool [rows, 1], and what the host knows of them.

    Attributes:
        top_k: at most the vocabulary.
        warm: of rows that are drawn at all, those whose temperature is not 0.
        cut: of rows that are drawn from their likeliest tokens.
        any_cut: whether there is such a row.
        any_whole: whether a row is drawn from a whole vocabulary.
        any_mass: whether a row's top-p is of the mass of a whole vocabulary.
        any_floor: whether a row that is drawn from a whole vocabulary has a min_p.
    """

    number: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    warm: torch.Tensor
    cut: torch.Tensor
    any_cut: bool
    any_whole: bool
    any_mass: bool
    any_floor: bool


def enough(wishes: Sequence[Wish], vocabulary: int, least: int) -> int:
    """So many candidates, ``least`` or more, probably decide every cut."""
    # More than the largest top_k, since tokens that equal its last one decide which of them it takes.
    most = 2 * max((wish.top_k for wish in wishes if _is_cut(wish, vocabulary) and wish.top_k < vocabulary), default=0)
    count = max(least, most)
    return count if 4 * count <= vocabulary else vocabulary


def draw(
    scores: torch.Tensor, best: torch.Tensor, likeliest: torch.Tensor, wishes: Sequence[Wish], candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Args:
        scores: float32 [rows, vocabulary].
        best: float32 [rows], the largest of each row. What comes of rows where it is not finite means nothing.
        likeliest: int64 [rows], its token.
        candidates: cuts look at so many of a row's tokens.

    Returns:
        The tokens, int64 [rows], and where the candidates decided them, bool [rows]: everywhere if they are the whole
        vocabulary. A token depends neither on other rows nor, where decided, on the number of candidates.
    """
    decided = torch.ones_like(best, dtype=torch.bool)
    if all(wish.temperature == 0 for wish in wishes):
        return likeliest, decided
    table = _table(wishes, scores.shape[-1], scores.device)
    tokens, best = likeliest[:, None], best.double()[:, None]
    mass = torch.zeros_like(best)
    if table.any_whole or table.any_mass:
        blocks = _weights(_in_blocks(scores), best[:, None], table.temperature[:, None])
        sums = blocks.sum(-1)
        mass = sums.sum(-1, keepdim=True)
        if table.any_floor:
            blocks.masked_fill_(blocks < table.min_p[:, None], 0.0)
            sums = blocks.sum(-1)
        if table.any_whole:
            tokens = torch.where(table.warm, _draw_from_blocks(blocks, sums, table.number), tokens)
    if table.any_cut:
        drawn, decided = _draw_from_likeliest(scores, best, mass, table, candidates)
        tokens = torch.where(table.cut, drawn, tokens)
        decided = decided | ~table.cut[:, 0]
    return tokens[:, 0], decided


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """On the device. It is not waited for, however much the device still has to do before."""
    tensor = torch.from_numpy(values)
    # Copies from memory that is not page-locked may wait, large ones above all.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _is_cut(wish: Wish, vocabulary: int) -> bool:
    return wish.temperature > 0 and (0 < wish.top_k < vocabulary or wish.top_p < 1)


def _table(wishes: Sequence[Wish], vocabulary: int, device: torch.device) -> _Table:
    warm = np.array([wish.temperature > 0 for wish in wishes])
    cut = np.array([_is_cut(wish, vocabulary) for wish in wishes])
    top_k = np.array([min(wish.top_k or vocabulary, vocabulary) for wish in wishes])
    min_p = np.array([wish.min_p for wish in wishes])
    values = [
        [wish.number for wish in wishes],
        [wish.temperature or 1.0 for wish in wishes],
        top_k,
        [wish.top_p for wish in wishes],
        min_p,
        warm,
        cut,
    ]
    # In one copy, which the host does not wait for.
    columns = to_device(np.array(values, dtype=np.float64)[:, :, None], device).unbind()
    return _Table(
        number=columns[0],
        temperature=columns[1],
        top_k=columns[2],
        top_p=columns[3],
        min_p=columns[4],
        warm=columns[5] > 0,
        cut=columns[6] > 0,
        any_cut=bool(cut.any()),
        any_whole=bool((warm & ~cut).any()),
        any_mass=bool((cut & (top_k == vocabulary)).any()),
        any_floor=bool((min_p * (warm & ~cut)).any()),
    )


def _in_blocks(scores: torch.Tensor) -> torch.Tensor:
    """float64 [rows, blocks, tokens]. The last block is filled up with what is never drawn."""
    rows, vocabulary = scores.shape
    blocks = scores.new_full((rows, -(-vocabulary // _BLOCK), _BLOCK), -torch.inf, dtype=torch.float64)
    blocks.flatten(1)[:, :vocabulary] = scores
    return blocks


def _weights(scores: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Probabilities but for a factor: 1 for the likeliest. In float64, since sums decide where a cut or a draw falls;
    in the place of the scores, since new memory for a vocabulary takes longer than this on a CPU."""
    return scores.sub_(best).div_(temperature).exp_()


def _draw_from_blocks(blocks: torch.Tensor, sums: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """int64 [rows, 1]: tokens laid out by id, by weights [rows, blocks, tokens] and their sums [rows, blocks]."""
    ends = sums.cumsum(-1)
    target = _target(number, ends)
    block = _place(ends, target)
    before = ends.gather(-1, block) - sums.gather(-1, block)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].cumsum(-1)
    # Sums in another order differ in their last bits: the target stays inside its block.
    target = torch.minimum((target - before).clamp(min=0), _below(inside[:, -1:]))
    return block * _BLOCK + _place(inside, target)


def _draw_from_likeliest(
    scores: torch.Tensor, best: torch.Tensor, mass: torch.Tensor, table: _Table, candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [rows, 1], and where the candidates decided, bool [rows]. ``mass`` is a whole row's."""
    # In the order of ids, so that equals keep it, and a draw does not depend on how many candidates there are.
    ids = _candidates(scores, candidates)
    ordered, order = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    kept = _cut(_weights(ordered.double(), best, table.temperature), mass, table, scores.shape[-1])
    # What is no candidate may equal the last one, and come before it by its id: nothing like that may take part.
    decided = ((kept == 0) | (ordered > ordered[:, -1:])).all(-1)
    if candidates == scores.shape[-1]:
        decided = torch.ones_like(decided)
    ends = torch.zeros_like(kept).scatter(-1, order, kept).cumsum(-1)
    return ids.gather(-1, _place(ends, _target(table.number, ends))), decided


def _candidates(scores: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [rows, count]: so many of the likeliest tokens, by id."""
    if count == scores.shape[-1]:
        return torch.arange(count, device=scores.device).expand(len(scores), -1)
    return scores.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values


def _cut(weights: torch.Tensor, mass: torch.Tensor, table: _Table, vocabulary: int) -> torch.Tensor:
    """top-k, top-p of what that left, min-p. Zero for what does not take part. Weights fall along each row."""
    ranks = torch.arange(weights.shape[-1], device=weights.device)
    weights = weights.masked_fill(ranks >= table.top_k, 0.0)
    ends = weights.cumsum(-1)
    mass = torch.where(table.top_k < vocabulary, ends[:, -1:], mass)
    outside = (ends - weights >= table.top_p * mass) & (table.top_p < 1)
    return weights.masked_fill(outside | (weights < table.min_p), 0.0)


def _target(number: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    total = ends[:, -1:]
    return torch.minimum(number * total, _below(total))


def _below(values: torch.Tensor) -> torch.Tensor:
    return values.nextafter(torch.zeros_like(values))


def _place(ends: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """int64 [rows, 1]: the first whose running sum is above the target, so that its own weight is not zero."""
    return torch.searchsorted(ends, target, right=True).clamp(max=ends.shape[-1] - 1)
