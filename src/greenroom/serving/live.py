"""LiveRequest: one request on the engine's thread, from its first token to its last event."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from greenroom.errors import EngineError, GreenroomError
from greenroom.serving.requests import (
    Event,
    Failed,
    Finished,
    FinishReason,
    OnEvent,
    Piece,
    SamplingParams,
    TokenConstraint,
)
from greenroom.serving.sampling import Choice, Row
from greenroom.serving.sequence import Sequence
from greenroom.serving.text import OutputText

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Accepted:
    """A request as it was taken, checked. max_new: tokens. seed: of its random numbers. end_tokens: of the model."""

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    on_event: OnEvent
    constraint: TokenConstraint | None
    max_new: int
    seed: int
    end_tokens: frozenset[int]


class LiveRequest:
    """Chooses and delivers the tokens of one request. What fails in here ends this request alone.

    What nobody has to know before the next pass is only taken down, and delivered while that pass runs.

    Attributes:
        sequence: its tokens and blocks.
        ended: its last event, once there is one.
    """

    def __init__(self, accepted: Accepted, tokenizer: PreTrainedTokenizerBase) -> None:
        self.sequence = Sequence(accepted.request_id, [*accepted.prompt_ids])
        self.ended: Finished | Failed | None = None
        self._request = accepted
        self._text = OutputText(tokenizer, accepted.params.stop)
        own = frozenset() if accepted.params.ignore_eos else accepted.end_tokens
        self._end_tokens = own | frozenset(accepted.params.stop_token_ids)
        self._due: Choice | None = None  # the last token, if it ended nothing and has not been delivered

    @property
    def request_id(self) -> int:
        return self._request.request_id

    @property
    def max_length(self) -> int:
        """Tokens that prompt and output may have together."""
        return len(self._request.prompt_ids) + self._request.max_new

    @property
    def completion_tokens(self) -> int:
        return len(self.sequence.tokens) - self.sequence.prompt_tokens

    @property
    def nearly_done(self) -> bool:
        """Whether the next token is the last one, whatever it is."""
        return self.completion_tokens + 1 >= self._request.max_new

    def row(self, vocabulary: int) -> Row:
        """What sampling needs to know.

        Raises:
            GreenroomError: the constraint failed.
        """
        request, allowed = self._request, None
        if request.constraint is not None:
            allowed = self._guarded("the constraint failed", request.constraint.allowed)
            _check_mask(allowed, vocabulary)
        return Row(request.params, request.seed, self.completion_tokens, self.sequence.tokens, allowed)

    def take(self, choice: Choice, append: Callable[[Sequence, int], None]) -> None:
        """Goes on with a choice, and ends if that was the last token.

        What the token brings is due, unless it ends the output or its text might: then it is delivered at once.

        Raises:
            GreenroomError: there was nothing to choose, the constraint failed, or nobody takes what is delivered.
        """
        assert self._due is None, "what was due is delivered before another token is chosen"
        token, request = choice.token, self._request
        if token is None:
            why = "the constraint allows no token" if request.constraint else "the model's logits are not finite"
            raise EngineError(f"no token could be chosen: {why}")
        append(self.sequence, token)
        satisfied = False
        if (constraint := request.constraint) is not None:
            self._guarded("the constraint failed", lambda: constraint.accept(token))
            satisfied = self._guarded("the constraint failed", constraint.finished)
        is_end = token in self._end_tokens
        is_last = is_end or satisfied or self.completion_tokens >= request.max_new
        if not is_last and not request.params.stop:
            self._due = choice
            return
        text, stopped = ("", False) if is_end else self._text.add(token)
        reason = FinishReason.STOP if is_end or stopped or satisfied else None
        if reason is None and is_last:
            reason = FinishReason.LENGTH
        if reason is not None and not stopped:
            rest, stopped = self._text.end()
            text += rest
            reason = FinishReason.STOP if stopped else reason
        self._deliver(_piece(text, choice))
        if reason is not None:
            self.finish(reason)

    def deliver(self) -> None:
        """Delivers what is due.

        Raises:
            GreenroomError: nobody takes it.
        """
        choice, self._due = self._due, None
        if choice is None:
            return
        assert choice.token is not None
        text, _ = self._text.add(choice.token)
        self._deliver(_piece(text, choice))

    def finish(self, reason: FinishReason) -> None:
        """Delivers the last event."""
        sequence = self.sequence
        cached = sequence.cached_tokens or 0
        self._end(Finished(reason, sequence.prompt_tokens, self.completion_tokens, cached))

    def fail(self, error: GreenroomError) -> None:
        """Delivers the last event."""
        self._end(Failed(error))

    def _end(self, event: Finished | Failed) -> None:
        if self.ended is not None:
            return
        self.ended = event
        try:
            self.deliver()
            self._deliver(event)
        except GreenroomError as error:
            _log.warning("nobody learns how request %d ended: %s", self.request_id, error)

    def _deliver(self, event: Event) -> None:
        self._guarded("the request's on_event failed", lambda: self._request.on_event(event))

    def _guarded(self, what: str, call: Callable[[], T]) -> T:
        """Code of others: whatever it raises becomes an error of this request."""
        try:
            return call()
        except GreenroomError:
            raise
        except Exception as error:
            raise EngineError(f"{what}: {error!r}") from error


def _piece(text: str, choice: Choice) -> Piece:
    assert choice.token is not None
    return Piece(text, (choice.token,), (choice.logprob,) if choice.logprob else ())


def _check_mask(allowed: np.ndarray, vocabulary: int) -> None:
    words = -(-vocabulary // 32)
    if allowed.dtype != np.uint32 or allowed.shape != (words,):
        raise EngineError(
            f"the constraint gives {allowed.dtype} {[*allowed.shape]}, but {vocabulary} tokens take uint32 [{words}]"
        )
