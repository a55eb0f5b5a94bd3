"""What crosses the boundary between a server and the engine: a request, and what comes back of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

from greenroom.errors import GreenroomError
from greenroom.kv.base import KVOffloadStats


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen. ``check_params`` tells whether they make sense.

    Attributes:
        max_tokens: new tokens at most. None: as many as the context holds.
        temperature: 0 takes the likeliest token.
        top_p: only the likeliest tokens of this mass take part.
        top_k: only so many of the likeliest take part; 0 for all.
        min_p: only tokens of at least this share of the likeliest one's probability take part.
        repetition_penalty: logits of tokens seen in prompt or output are divided by it if positive, else multiplied.
        presence_penalty: taken from the logits of tokens that the output has.
        frequency_penalty: the same, times how often it has them.
        seed: of this request's own random numbers. None: another one each time.
        logit_bias: added to the logits of these tokens.
        stop: texts that end the output; they are not part of it.
        stop_token_ids: tokens that end the output besides the model's own.
        ignore_eos: go on behind the model's end tokens.
        logprobs: of each token, its log probability and those of so many likeliest; None for none.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


class TokenConstraint(Protocol):
    """Limits what may come next, as a grammar does. Used by one thread at a time."""

    def allowed(self) -> np.ndarray:
        """Bits of the tokens that may come next: uint32 [ceil(vocabulary / 32)], lowest bit first."""

    def accept(self, token: int) -> None:
        """``token`` has come."""

    def finished(self) -> bool:
        """Whether nothing more may come."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log probability before temperature and cuts, and the likeliest ones in its place, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """New output. ``text`` ends with a whole character and may be empty; the pieces add up to the whole text.

    ``token_ids`` are those newly chosen, ``logprobs`` one for each if they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class FinishReason(StrEnum):
    """Why an output ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Finished:
    """The last event of a request that went well or was cancelled.

    cached_tokens: of the prompt, those whose keys and values were there already.
    """

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Failed:
    """The last event of a request that could not be finished."""

    error: GreenroomError


Event = Piece | Finished | Failed
OnEvent = Callable[[Event], None]
"""Called on the engine's thread: it must return at once and must not raise."""


class RequestHandle(Protocol):
    """A request that has been taken."""

    @property
    def request_id(self) -> int:
        """Counts from 0."""

    def cancel(self) -> None:
        """Ends the request soon, from any thread; ``Finished`` follows if it had not ended by itself. Idempotent."""


class Engine(Protocol):
    """What a server needs of an engine. All methods may be called from any thread."""

    @property
    def context_length(self) -> int:
        """Tokens that prompt and output of one request may have together."""

    @property
    def vocabulary(self) -> int:
        """Width of the logits."""

    @property
    def capacity(self) -> int:
        """Requests that run or wait at most."""

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_event: OnEvent,
        constraint: TokenConstraint | None = None,
    ) -> RequestHandle:
        """Takes a request; events follow, the last one ``Finished`` or ``Failed``.

        Raises:
            ConfigError: the prompt or a parameter cannot be served.
            QueueFullError: too many requests wait.
            EngineError: the engine is closed or drains.
        """

    def stats(self) -> "EngineStats":
        """Counts so far."""

    def drain(self, timeout_s: float) -> bool:
        """Takes no more requests and waits for those there are; returns whether all ended in time."""

    def close(self) -> None:
        """Cancels what runs and ends the thread. Idempotent. The model stays open."""


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine began, and what holds at this moment.

    running, waiting: requests now. finished: requests by reason ("stop", "length", "cancelled", "failed").
    prompt_tokens, completion_tokens: processed and chosen. cached_tokens: of prompts, found in the KV cache.
    loaded_tokens: of those, brought back from host memory. preemptions: requests that had to give up their blocks.
    kv_blocks, kv_blocks_used: on the device, used by running requests.
    steps: forward passes; step_seconds: their time.
    kv_offload: what host memory for KV blocks has done; None without.
    """

    running: int
    waiting: int
    finished: Mapping[str, int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    loaded_tokens: int
    preemptions: int
    kv_blocks: int
    kv_blocks_used: int
    steps: int
    step_seconds: float
    kv_offload: KVOffloadStats | None = None
