"""sample: the next token of every sequence of a batch, each by its own parameters, in a few vectorised steps.

In this order: logit bias, penalties, constraint, temperature, top-k, top-p (of what top-k left), min-p, draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator, Philox

from greenroom.serving.requests import SamplingParams, TokenLogprob

_SEED_MASK = 2**64 - 1

_CANDIDATES = 2048
"""On the CPU, so many of the likeliest tokens are ordered first; the whole vocabulary only if top-p asks for more."""


@dataclass(frozen=True)
class Row:
    """What is needed to choose one sequence's next token.

    Attributes:
        params: of the request; ``seed`` is not looked at.
        seed: of its random numbers.
        position: of the token in the output, so many tokens of which are there. Seed and position give the random
            number, and nothing else does.
        tokens: prompt and output so far. Looked at only where there are penalties.
        allowed: uint32 [ceil(vocabulary / 32)], bits of the tokens that may come; None for all.
    """

    params: SamplingParams
    seed: int
    position: int
    tokens: Sequence[int]
    allowed: np.ndarray | None = None


@dataclass(frozen=True)
class Choice:
    """A token, or None if the logits are not finite or nothing was allowed. ``logprob`` if it was asked for."""

    token: int | None
    logprob: TokenLogprob | None = None


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of one place in one request's output."""
    return float(Generator(Philox(key=seed & _SEED_MASK, counter=position)).random())


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[Choice]:
    """
    Args:
        logits: [rows, vocabulary], any float dtype, on any device. Not changed.

    Returns:
        One choice for each row. The host waits for the device once.
    """
    if all(_takes_likeliest(row) for row in rows):
        return _likeliest(logits)
    raw = logits.float()
    scores = _constrain(_penalise(_bias(raw, rows), rows), rows)
    valid = scores.amax(-1).isfinite() & ~raw.isnan().any(-1)
    tokens = torch.where(valid, _draw(scores, rows), -1)
    # Token ids are exact in float64, so that everything crosses to the host in one copy.
    columns = [tokens[:, None].double()]
    most = max((row.params.logprobs for row in rows if row.params.logprobs is not None), default=None)
    if most is not None:
        logprobs = raw.log_softmax(-1)
        columns.append(logprobs.gather(-1, tokens.clamp(min=0)[:, None]).double())
        values, ids = logprobs.topk(min(most, raw.shape[-1]), -1)
        columns += [ids.double(), values.double()]
    result = torch.cat(columns, -1).cpu().numpy()
    return [_choice(row, values, most) for row, values in zip(rows, result, strict=True)]


def _takes_likeliest(row: Row) -> bool:
    """Whether the row wants the likeliest token by the logits themselves, and nothing else."""
    params = row.params
    if params.temperature or params.logit_bias or params.logprobs is not None or row.allowed is not None:
        return False
    return params.repetition_penalty == 1.0 and not (params.presence_penalty or params.frequency_penalty)


def _likeliest(logits: torch.Tensor) -> list[Choice]:
    """What ``sample`` makes of rows that all take it, in as few kernels as there may be: the device waits meanwhile."""
    # The largest logit of a row with a NaN is a NaN.
    best = logits.max(-1)
    values, tokens = torch.stack((best.values.double(), best.indices.double())).cpu().numpy()
    finite = np.isfinite(values).tolist()
    return [Choice(token if known else None) for token, known in zip(tokens.astype(int).tolist(), finite, strict=True)]


def _choice(row: Row, values: np.ndarray, most: int | None) -> Choice:
    """One row of the result: token, its log probability, ids and log probabilities of the likeliest."""
    token = int(values[0])
    if token < 0:
        return Choice(None)
    count = row.params.logprobs
    if count is None or most is None:
        return Choice(token)
    ids, logprobs = np.split(values[2:], 2)
    top = tuple((int(id_), float(logprob)) for id_, logprob in zip(ids[:count], logprobs[:count], strict=True))
    return Choice(token, TokenLogprob(token, float(values[1]), top))


def _bias(scores: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    entries = [(index, token, bias) for index, row in enumerate(rows) for token, bias in row.params.logit_bias.items()]
    if not entries:
        return scores
    where, tokens, values = zip(*entries, strict=True)
    device = scores.device
    place = (_to(np.array(where), device), _to(np.array(tokens), device))
    return scores.index_put(place, _to(np.array(values, dtype=np.float32), device), accumulate=True)


def _penalise(scores: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Repetition, then presence and frequency, at the tokens that a row has seen: one entry a row and token."""
    places, tokens, factors, losses = [], [], [], []
    for index, row in enumerate(rows):
        if (seen := _seen(row)) is not None:
            ids, counts = seen
            params = row.params
            places.append(np.full(len(ids), index))
            tokens.append(ids)
            factors.append(np.full(len(ids), params.repetition_penalty, dtype=np.float32))
            losses.append((counts > 0) * params.presence_penalty + counts * params.frequency_penalty)
    if not tokens:
        return scores
    device = scores.device
    place = (_to(np.concatenate(places), device), _to(np.concatenate(tokens), device))
    factor = _to(np.concatenate(factors), device)
    loss = _to(np.concatenate(losses).astype(np.float32), device)
    old = scores[place]
    return scores.index_put(place, torch.where(old > 0, old / factor, old * factor) - loss)


def _seen(row: Row) -> tuple[np.ndarray, np.ndarray] | None:
    """int64 ids of the tokens that a row's penalties touch, and how often its output has them; None for none."""
    params = row.params
    prompt = len(row.tokens) - row.position
    if params.repetition_penalty != 1.0:
        tokens, output = np.array(row.tokens, dtype=np.int64), prompt
    elif params.presence_penalty or params.frequency_penalty:
        tokens, output = np.array(row.tokens[prompt:], dtype=np.int64), 0
    else:
        return None
    ids, places = np.unique(tokens, return_inverse=True)
    return ids, np.bincount(places[output:], minlength=len(ids))


def _constrain(scores: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    if all(row.allowed is None for row in rows):
        return scores
    words = -(-scores.shape[-1] // 32)
    bits = np.full((len(rows), words), 0xFFFFFFFF, dtype=np.uint32)
    for index, row in enumerate(rows):
        if row.allowed is not None:
            bits[index] = row.allowed
    mask = _to(bits.view(np.int32), scores.device)
    places = torch.arange(32, dtype=torch.int32, device=scores.device)
    allowed = ((mask[:, :, None] >> places) & 1).bool().flatten(1)[:, : scores.shape[-1]]
    return scores.masked_fill(~allowed, -torch.inf)


def _draw(scores: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """int64 [rows]: the likeliest token where temperature is 0, else one by its probability."""
    likeliest = scores.argmax(-1)
    if all(row.params.temperature == 0 for row in rows):
        return likeliest
    warm = np.array([row.params.temperature or 1.0 for row in rows])
    draws = np.array([uniform(row.seed, row.position) if row.params.temperature else 0.0 for row in rows])
    # In float64: sums over a large vocabulary decide where a cut or a draw falls.
    probabilities = (scores.double() / _to(warm, scores.device)[:, None]).softmax(-1)
    probabilities = _cut(probabilities, rows)
    # In the order of token ids, so that a row's draw does not depend on whether others made a sort necessary.
    sums = probabilities.cumsum(-1)
    total = sums[:, -1:]
    target = torch.minimum(_to(draws, scores.device)[:, None] * total, total.nextafter(torch.zeros_like(total)))
    drawn = torch.searchsorted(sums, target, right=True)[:, 0].clamp(max=scores.shape[-1] - 1)
    greedy = _to(np.array([row.params.temperature == 0 for row in rows]), scores.device)
    return torch.where(greedy, likeliest, drawn)


def _cut(probabilities: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Zero for the tokens that do not take part. float64 [rows, vocabulary]"""
    device, vocabulary = probabilities.device, probabilities.shape[-1]
    params = [row.params for row in rows]
    if any(p.top_k or p.top_p < 1 for p in params):
        if device.type == "cpu" and vocabulary > _CANDIDATES:
            probabilities = torch.stack([_cut_row(row, p) for row, p in zip(probabilities, params, strict=True)])
        else:
            probabilities = _cut_by_rank(probabilities, params)
    if any(p.min_p for p in params):
        min_p = _to(np.array([p.min_p for p in params]), device)[:, None]
        least = min_p * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    return probabilities


def _cut_by_rank(probabilities: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """top-k, then top-p of what that left. Equal tokens rank by their ids."""
    device, vocabulary = probabilities.device, probabilities.shape[-1]
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    top_k = _to(np.array([min(p.top_k, vocabulary) or vocabulary for p in params]), device)[:, None]
    ordered = ordered.masked_fill(torch.arange(vocabulary, device=device) >= top_k, 0.0)
    top_p = _to(np.array([p.top_p for p in params]), device)[:, None]
    before = ordered.cumsum(-1) - ordered
    keep = (before < top_p * ordered.sum(-1, keepdim=True)) | (top_p >= 1)
    return torch.zeros_like(probabilities).scatter(-1, ids, ordered.masked_fill(~keep, 0.0))


def _cut_row(probabilities: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The same for one row, on the CPU, where ordering a whole vocabulary takes as long as a small model's step."""
    if not params.top_k and params.top_p >= 1:
        return probabilities
    least = probabilities.topk(min(params.top_k or _CANDIDATES, len(probabilities))).values[-1]
    # All that equal the last one: which of equals come first is not left to ``topk``.
    ids = (probabilities >= least).nonzero()[:, 0]
    ordered, order = probabilities[ids].sort(descending=True, stable=True)
    if params.top_k:
        ordered = ordered[: params.top_k]
    if params.top_p < 1:
        total = ordered.sum() if params.top_k else probabilities.sum()
        before = ordered.cumsum(-1) - ordered
        keep = int((before < params.top_p * total).sum())  # a prefix, since they fall
        if keep == len(ids) < len(probabilities) and not params.top_k:
            return _cut_by_rank(probabilities[None], [params])[0]  # the candidates do not hold the mass
        ordered = ordered[:keep]
    return torch.zeros_like(probabilities).scatter(-1, ids[order[: len(ordered)]], ordered)


def _to(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """To the device, without waiting for it."""
    return torch.from_numpy(values).to(device, non_blocking=True)
