"""One request's next token in float64, step by step, in plain Python. Slow and obvious."""

import math

import numpy as np

from greenroom.serving.requests import SamplingParams


def probabilities(logits, params: SamplingParams, tokens, position, allowed=None) -> list[float]:
    """Of every token; ``tokens`` are prompt and output, ``position`` of them output; ``allowed`` ids or None."""
    scores = [float(value) for value in logits]
    output = tokens[len(tokens) - position :]
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in set(tokens):
        scores[token] = (
            scores[token] / params.repetition_penalty
            if scores[token] > 0
            else scores[token] * params.repetition_penalty
        )
    for token in set(output):
        scores[token] -= params.presence_penalty + output.count(token) * params.frequency_penalty
    if allowed is not None:
        scores = [score if token in allowed else -math.inf for token, score in enumerate(scores)]
    best = max(scores)
    if params.temperature == 0:
        winner = scores.index(best)
        return [float(token == winner) for token in range(len(scores))]
    weights = [math.exp((score - best) / params.temperature) for score in scores]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        total, before, kept = sum(weights[token] for token in order), 0.0, []
        for token in order:
            if before >= params.top_p * total:
                break
            kept.append(token)
            before += weights[token]
        order = kept
    order = [token for token in order if weights[token] >= params.min_p * weights[order[0]]]
    total = sum(weights[token] for token in order)
    return [weights[token] / total if token in order else 0.0 for token in range(len(weights))]


def choose(chances: list[float], uniform: float) -> int:
    """The token whose share of [0, 1), laid out by id, holds ``uniform``."""
    passed = 0.0
    for token, chance in enumerate(chances):
        passed += chance
        if chance and uniform < passed:
            return token
    return int(np.nonzero(chances)[0][-1])


def log_probabilities(logits) -> list[float]:
    """Of the model's own distribution."""
    best = max(logits)
    total = math.log(sum(math.exp(value - best) for value in logits))
    return [value - best - total for value in logits]
