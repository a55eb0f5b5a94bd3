"""sample: the next token of every sequence of a batch, each by its own parameters, in a few vectorised steps.

In this order: logit bias, penalties, constraint, temperature, top-k, top-p (of what top-k left), min-p, draw.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.random import Generator, Philox

from greenroom.engine.arrival import Arrival
from greenroom.serving.draw import Wish, draw, enough, to_device
from greenroom.serving.requests import SamplingParams, TokenLogprob

_SEED_MASK = 2**64 - 1

_CANDIDATES = 2048
"""Cuts look at so many of the likeliest tokens first; at the whole vocabulary only where those do not decide."""


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


class Choosing:
    """The choices of one pass, on their way to the host. See ``begin``."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        self._logits = logits
        self._rows = rows
        self._greedy = all(_takes_likeliest(row) for row in rows)
        if self._greedy:
            device = _likeliest(logits)
        else:
            vocabulary = logits.shape[-1]
            self._wishes = [_wish(row) for row in rows]
            device = _choose(logits, rows, self._wishes, enough(self._wishes, vocabulary, _CANDIDATES))
        self._arrival = Arrival(device)

    def result(self) -> list[Choice]:
        """Waits for the device, which has done its part already if the pass has ended.

        It is waited for once more for rows that are cut where their distribution is so flat that the likeliest tokens
        do not decide.
        """
        if self._greedy:
            # The device idles from here on: few operations.
            values, tokens = self._arrival.wait().tolist()
            return [
                Choice(int(token) if math.isfinite(value) else None)
                for token, value in zip(tokens, values, strict=True)
            ]
        rows, logits = self._rows, self._logits
        first = _read(rows, self._arrival.wait())
        open_ = [index for index, choice in enumerate(first) if choice is None]
        again: Iterator[Choice | None] = iter(())
        if open_:
            some, those = logits.index_select(0, to_device(np.array(open_), logits.device)), [rows[i] for i in open_]
            table = _choose(some, those, [self._wishes[i] for i in open_], logits.shape[-1])
            again = iter(_read(those, Arrival(table).wait()))
        return [choice or cast("Choice", next(again)) for choice in first]


def begin(logits: torch.Tensor, rows: Sequence[Row]) -> Choosing:
    """Enqueues what it takes to choose a token for each row, without waiting for the device.

    Args:
        logits: [rows, vocabulary], any float dtype, on any device; they may still have to be computed. Not changed,
            and to stay as they are until ``result``.
    """
    return Choosing(logits, rows)


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[Choice]:
    """One choice for each row: ``begin``, and its result."""
    return begin(logits, rows).result()


def _choose(logits: torch.Tensor, rows: Sequence[Row], wishes: Sequence[Wish], candidates: int) -> torch.Tensor:
    """What ``_read`` makes choices of: float64 [rows, 2 or more]."""
    raw = logits.float()
    scores = _constrain(_penalise(_bias(raw, rows), rows), rows)
    best, likeliest = scores.max(-1)
    # The largest of a row with a NaN is a NaN, unless a constraint has hidden it.
    valid = best.isfinite() if scores is raw else best.isfinite() & ~raw.isnan().any(-1)
    drawn, decided = draw(scores, best, likeliest, wishes, candidates)
    tokens = torch.where(valid, drawn, -1)
    # Token ids are exact in float64, so that everything crosses to the host in one copy.
    columns = [(decided | ~valid)[:, None].double(), tokens[:, None].double()]
    most = _most_logprobs(rows)
    if most is not None:
        mass = raw.logsumexp(-1, keepdim=True)
        values, ids = raw.topk(min(most, raw.shape[-1]), -1)
        chosen = raw.gather(-1, tokens.clamp(min=0)[:, None])
        columns += [(chosen - mass).double(), ids.double(), (values - mass).double()]
    return torch.cat(columns, -1)


def _read(rows: Sequence[Row], table: np.ndarray) -> list[Choice | None]:
    """One for each row; None where so many candidates do not decide, which the whole vocabulary always does."""
    most = _most_logprobs(rows)
    return [_choice(row, values[1:], most) if values[0] else None for row, values in zip(rows, table, strict=True)]


def _most_logprobs(rows: Sequence[Row]) -> int | None:
    return max((row.params.logprobs for row in rows if row.params.logprobs is not None), default=None)


def _wish(row: Row) -> Wish:
    params = row.params
    number = uniform(row.seed, row.position) if params.temperature else 0.0
    return Wish(number, params.temperature, params.top_k, params.top_p, params.min_p)


def _takes_likeliest(row: Row) -> bool:
    """Whether the row wants the likeliest token by the logits themselves, and nothing else."""
    params = row.params
    if params.temperature or params.logit_bias or params.logprobs is not None or row.allowed is not None:
        return False
    return params.repetition_penalty == 1.0 and not (params.presence_penalty or params.frequency_penalty)


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """float64 [2, rows]: the largest logits, a NaN of rows that have one, and their tokens. Few kernels."""
    best = logits.max(-1)
    # Token ids are exact in float64, so that both cross to the host in one copy.
    return torch.stack((best.values.double(), best.indices.double()))


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
    place = (to_device(np.array(where), device), to_device(np.array(tokens), device))
    return scores.index_put(place, to_device(np.array(values, dtype=np.float32), device), accumulate=True)


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
    place = (to_device(np.concatenate(places), device), to_device(np.concatenate(tokens), device))
    factor = to_device(np.concatenate(factors), device)
    loss = to_device(np.concatenate(losses).astype(np.float32), device)
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
    mask = to_device(bits.view(np.int32), scores.device)
    places = torch.arange(32, dtype=torch.int32, device=scores.device)
    allowed = ((mask[:, :, None] >> places) & 1).bool().flatten(1)[:, : scores.shape[-1]]
    return scores.masked_fill(~allowed, -torch.inf)
