"""ServingEngine: requests from any thread, one thread that serves them."""

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from greenroom.engine.batch import BatchRunner
from greenroom.errors import ConfigError, EngineError, GreenroomError, QueueFullError
from greenroom.kv.base import KVOffload
from greenroom.serving.live import Accepted
from greenroom.serving.loop import EngineLoop
from greenroom.serving.params import check_params, check_prompt
from greenroom.serving.requests import EngineStats, OnEvent, SamplingParams, TokenConstraint

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFacts:
    """What an engine has to know of a model besides how to run it.

    vocabulary: width of the logits. context_length: tokens that prompt and output may have together.
    end_tokens: end an output. device: of the model.
    """

    vocabulary: int
    context_length: int
    end_tokens: frozenset[int]
    device: torch.device


@dataclass(frozen=True)
class Handle:
    """A ``RequestHandle``."""

    request_id: int
    _cancel: Callable[[int], None]

    def cancel(self) -> None:
        """See ``RequestHandle``."""
        self._cancel(self.request_id)


class ServingEngine:
    """An ``Engine`` over a runner, which it closes in the end, as it does the offload.

    Callers write the inbox, the cancellations and the flags under one lock; the engine's thread takes the former two
    between two passes. Everything else is that thread's own, but for the published counts. No lock is held while a
    pass runs or an event is delivered, so ``on_event`` may call any method.
    """

    def __init__(
        self,
        facts: ModelFacts,
        tokenizer: PreTrainedTokenizerBase,
        runner: BatchRunner,
        *,
        max_waiting: int = 128,
        max_step_tokens: int | None = None,
        offload: KVOffload | None = None,
        reuse: bool | None = None,
    ) -> None:
        """
        Args:
            max_waiting: requests that are taken beyond those that the runner runs at once.
            max_step_tokens: tokens of one pass, prompts and outputs together; None for what the runner takes.
            offload: host memory for KV blocks.
            reuse: blocks of one request may serve another. None: if the runner takes several sequences.

        Raises:
            ConfigError: a number out of range.
        """
        if max_waiting < 0:
            raise ConfigError(f"max_waiting must be 0 or more, not {max_waiting}")
        step_tokens = runner.max_tokens if max_step_tokens is None else min(max_step_tokens, runner.max_tokens)
        if step_tokens < runner.max_sequences:
            raise ConfigError(
                f"max_step_tokens must be at least {runner.max_sequences}, one for each sequence, not {step_tokens}"
            )
        self._facts = facts
        self._context_length = min(facts.context_length, runner.num_blocks * runner.block_size)
        self._capacity = runner.max_sequences + max_waiting
        self._loop = EngineLoop(tokenizer, runner, facts.vocabulary, step_tokens, offload, reuse)
        self._closers = [runner.close] + ([offload.close] if offload is not None else [])
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._inbox: list[Accepted] = []
        self._cancelled: list[int] = []
        self._unfinished: set[int] = set()
        self._next_id = 0
        self._closing = self._draining = False
        self._failure: GreenroomError | None = None
        self._stats = self._loop.stats()
        self._thread = threading.Thread(target=self._work, name="greenroom-engine", daemon=True)
        self._thread.start()

    @property
    def context_length(self) -> int:
        """See ``Engine``."""
        return self._context_length

    @property
    def vocabulary(self) -> int:
        """See ``Engine``."""
        return self._facts.vocabulary

    @property
    def capacity(self) -> int:
        """See ``Engine``."""
        return self._capacity

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_event: OnEvent,
        constraint: TokenConstraint | None = None,
    ) -> Handle:
        """See ``Engine``."""
        check_params(params, self._facts.vocabulary)
        prompt = tuple(prompt_ids)
        max_new = check_prompt(prompt, params, self._context_length, self._facts.vocabulary)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        with self._changed:
            self._check_open()
            if len(self._unfinished) >= self._capacity:
                raise QueueFullError(f"{len(self._unfinished)} requests run or wait; try again later")
            request_id = self._next_id
            self._next_id += 1
            self._unfinished.add(request_id)
            self._inbox.append(
                Accepted(request_id, prompt, params, on_event, constraint, max_new, seed, self._facts.end_tokens)
            )
            self._changed.notify_all()
        return Handle(request_id, self._cancel)

    def stats(self) -> EngineStats:
        """See ``Engine``."""
        with self._changed:
            return replace(self._stats, waiting=self._stats.waiting + len(self._inbox))

    def drain(self, timeout_s: float) -> bool:
        """See ``Engine``."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._unfinished, timeout_s)

    def close(self) -> None:
        """See ``Engine``."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _cancel(self, request_id: int) -> None:
        with self._changed:
            if request_id in self._unfinished:
                self._cancelled.append(request_id)
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine has failed: {self._failure}")
        if self._closing:
            raise EngineError("the engine is closed")
        if self._draining:
            raise EngineError("the engine takes no more requests: it drains")

    def _work(self) -> None:
        """The engine's thread."""
        # Callbacks in reverse order: publish last, whatever the others did.
        with ExitStack() as stack:
            stack.callback(self._publish)
            for close in self._closers:
                stack.callback(_log_failure, close)
            try:
                if self._facts.device.type == "cuda":
                    torch.cuda.set_device(self._facts.device)
                while self._take_news():
                    # Counts are published while the device works; an end is at once.
                    self._loop.step(self._publish)
                    if self._loop.has_ended:
                        self._publish()
            except Exception as error:
                self._give_up(error)
            else:
                self._loop.cancel_all()

    def _take_news(self) -> bool:
        """Waits until there is something to do and takes what callers left; False once the engine closes."""
        # A look without the lock, the device idles: what comes behind it is found before the next pass.
        if self._loop.busy and not (self._inbox or self._cancelled or self._closing):
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._inbox or self._cancelled or self._loop.busy)
            inbox, self._inbox = self._inbox, []
            cancelled, self._cancelled = self._cancelled, []
            closing = self._closing
        for accepted in inbox:
            self._loop.add(accepted)
        for request_id in cancelled:
            self._loop.cancel(request_id)
        if inbox or cancelled:
            self._publish()
        return not closing

    def _publish(self) -> None:
        stats, ended = self._loop.stats(), self._loop.take_ended()
        with self._changed:
            self._stats = stats
            if ended:
                self._unfinished.difference_update(ended)
                self._changed.notify_all()

    def _give_up(self, error: Exception) -> None:
        failure = error if isinstance(error, GreenroomError) else EngineError(f"the engine failed: {error!r}")
        with self._changed:  # from here on nobody submits
            self._failure = failure
            inbox, self._inbox = self._inbox, []
        for accepted in inbox:
            self._loop.add(accepted)
        self._loop.fail_all(failure)


def _log_failure(close: Callable[[], None]) -> None:
    """Calls ``close``. What it raises, on a device that has failed above all, must not keep others from closing."""
    try:
        close()
    except Exception:
        _log.exception("the engine could not close all that it used")
