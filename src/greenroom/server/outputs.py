"""Outputs: what one HTTP request asked of the engine, brought from its thread into the event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from greenroom.errors import ConfigError, GreenroomError
from greenroom.server.errors import ApiError, bad_request, of_engine, of_submission, unavailable
from greenroom.server.metrics import ServerMetrics
from greenroom.serving.requests import (
    Engine,
    Event,
    Failed,
    Finished,
    FinishReason,
    Piece,
    RequestHandle,
    SamplingParams,
    TokenConstraint,
)


@dataclass(frozen=True)
class Job:
    """One output to make. prompt: counts the prompts of the HTTP request, which several outputs may share."""

    prompt: int
    prompt_ids: Sequence[int]
    params: SamplingParams
    constraint: TokenConstraint | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens; a prompt with several outputs counts once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Outputs:
    """The event loop alone uses it; the engine's thread only puts events into its queue."""

    def __init__(self, engine: Engine, metrics: ServerMetrics, jobs: Sequence[Job]) -> None:
        """Submits all jobs, or none.

        Raises:
            ApiError: the engine does not take them.
        """
        if len(jobs) > engine.capacity:
            # Not 429: a client that tries again would do so for ever.
            raise bad_request(
                f"{len(jobs)} outputs are more than the {engine.capacity} that this server takes at once; "
                "lower n, or send fewer prompts",
                "n",
            )
        self._metrics = metrics
        self._jobs = jobs
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Event, float]] = asyncio.Queue()
        self._handles: list[RequestHandle] = []
        self._started = time.monotonic()
        self._last: dict[int, float] = {}
        self._finished: dict[int, Finished] = {}
        try:
            for index, job in enumerate(jobs):
                self._handles.append(self._submit(engine, index, job))
        except BaseException:
            self.cancel()
            raise

    async def events(self, deadline: float) -> AsyncIterator[tuple[int, Piece | Finished]]:
        """Events of all outputs, each with the output's number.

        Args:
            deadline: on the event loop's clock.

        Raises:
            TimeoutError: it has passed.
            ApiError: an output failed, or the server gave it up. The others are cancelled.
        """
        while len(self._finished) < len(self._jobs):
            # Not around the whole: a deadline must not strike while whoever takes the events has the turn.
            async with asyncio.timeout_at(deadline):
                index, event, at = await self._queue.get()
            if isinstance(event, Failed):
                self.cancel()
                raise of_engine(event.error)
            if isinstance(event, Finished):
                if event.reason is FinishReason.CANCELLED:
                    self.cancel()
                    raise unavailable("the server is shutting down and has given up this request")
                self._finished[index] = event
                self._metrics.finished(at - self._started, event)
            else:
                self._observe(index, event, at)
            yield index, event

    def cancel(self) -> None:
        """Ends what still runs. Idempotent."""
        for index, handle in enumerate(self._handles):
            if index not in self._finished:
                handle.cancel()

    def usage(self) -> Usage:
        """Of the outputs that have ended."""
        prompts: dict[int, int] = {}
        cached: dict[int, int] = {}
        for index, event in self._finished.items():
            prompt = self._jobs[index].prompt
            prompts[prompt] = event.prompt_tokens
            # The second output finds what the first has computed; the prompt was there only as far as for all.
            cached[prompt] = min(event.cached_tokens, cached.get(prompt, event.cached_tokens))
        completion = sum(event.completion_tokens for event in self._finished.values())
        return Usage(sum(prompts.values()), completion, sum(cached.values()))

    def _submit(self, engine: Engine, index: int, job: Job) -> RequestHandle:
        def deliver(event: Event) -> None:
            item = (index, event, time.monotonic())
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

        try:
            return engine.submit(job.prompt_ids, job.params, deliver, job.constraint)
        except ConfigError as error:
            raise _refused(error, job, engine.context_length) from error
        except GreenroomError as error:
            raise of_submission(error) from error

    def _observe(self, index: int, piece: Piece, at: float) -> None:
        if not piece.token_ids:
            return
        last = self._last.get(index)
        if last is None:
            self._metrics.first_token(at - self._started)
        else:
            self._metrics.next_tokens(at - last, len(piece.token_ids))
        self._last[index] = at


def _refused(error: ConfigError, job: Job, context: int) -> ApiError:
    message = str(error)
    if message.startswith("the prompt") and len(job.prompt_ids) + (job.params.max_tokens or 1) > context:
        return bad_request(message, code="context_length_exceeded")
    first = message.split()[0].rstrip(":,")
    return bad_request(message, first if first in SamplingParams.__dataclass_fields__ else None)
