"""Requests for tests: what each one gets alone, and who listens to its events."""

from collections.abc import Sequence

import numpy as np

from greenroom.serving.live import Accepted
from greenroom.serving.requests import Failed, Finished, Piece, SamplingParams
from greenroom.serving.sampling import uniform
from tests.reference.slow_runner import logits_of
from tests.reference.slow_sampling import choose, probabilities

EOS = 2


def alone(prompt: Sequence[int], params: SamplingParams, seed: int, max_new: int, vocabulary: int) -> list[int]:
    """Tokens of one request that has the model for itself, one token a pass."""
    tokens = [*prompt]
    for position in range(max_new):
        chances = probabilities(logits_of(tokens, vocabulary), params, tokens, position)
        tokens.append(choose(chances, uniform(seed, position)))
        if tokens[-1] in params.stop_token_ids or (tokens[-1] == EOS and not params.ignore_eos):
            break
    return tokens[len(prompt) :]


class Listener:
    """Collects the events of one request and holds them to their protocol."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.logprobs: list = []
        self.last: Finished | Failed | None = None

    def __call__(self, event) -> None:
        assert self.last is None, "an event behind the last one"
        if isinstance(event, Piece):
            self.tokens += event.token_ids
            self.text += event.text
            self.logprobs += event.logprobs
        else:
            self.last = event
            if isinstance(event, Finished):
                assert event.completion_tokens == len(self.tokens)


def accepted(
    request_id, prompt, params, listener, constraint=None, max_new=8, seed=None, end_tokens=frozenset({EOS})
) -> Accepted:
    own = seed if seed is not None else request_id
    return Accepted(request_id, tuple(prompt), params, listener, constraint, max_new, own, end_tokens)


class Allow:
    """Allows some tokens; ``broken`` names the method that raises."""

    def __init__(self, tokens, vocabulary, broken="") -> None:
        self._bits = np.zeros(-(-vocabulary // 32), dtype=np.uint32)
        for token in tokens:
            self._bits[token // 32] |= np.uint32(1 << (token % 32))
        self._broken = broken
        self.accepted: list[int] = []
        self.finish_after: int | None = None

    def allowed(self) -> np.ndarray:
        self._maybe_break("allowed")
        return self._bits

    def accept(self, token: int) -> None:
        self._maybe_break("accept")
        self.accepted.append(token)

    def finished(self) -> bool:
        self._maybe_break("finished")
        return self.finish_after is not None and len(self.accepted) >= self.finish_after

    def _maybe_break(self, method: str) -> None:
        if self._broken == method:
            raise KeyError("grammar")
