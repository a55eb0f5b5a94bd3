"""EngineLoop: plan a pass, run it, choose tokens, deliver them. One thread, no waiting for requests."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from greenroom.engine.batch import BatchRunner, SequenceChunk
from greenroom.errors import EngineError, GreenroomError
from greenroom.kv.base import KVOffload
from greenroom.serving.draft import Draft
from greenroom.serving.live import Accepted, LiveRequest
from greenroom.serving.planned import Planned
from greenroom.serving.requests import EngineStats, Failed, FinishReason
from greenroom.serving.sampling import Choice
from greenroom.serving.scheduler import Scheduler, SchedulerLimits

_FAILURES_IN_A_ROW = 3
_TRANSFER_WAIT_S = 0.002


@dataclass
class _Counts:
    finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0


class EngineLoop:
    """All requests that a ``ServingEngine`` has taken, and the passes over them.

    Attributes:
        scheduler: who runs when.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        runner: BatchRunner,
        vocabulary: int,
        step_tokens: int,
        offload: KVOffload | None = None,
        reuse: bool | None = None,
    ) -> None:
        """
        Args:
            vocabulary: width of the logits.
            step_tokens: of one pass, at most what the runner takes.
            offload: where full KV blocks are kept besides; the caller closes it.
            reuse: blocks of one request may serve another. None: if the runner takes several sequences, since one
                that takes a single one may not have its cache in blocks.
        """
        limits = SchedulerLimits(
            block_size=runner.block_size,
            num_blocks=runner.num_blocks,
            max_sequences=runner.max_sequences,
            max_tokens=step_tokens,
            reuse=runner.max_sequences > 1 if reuse is None else reuse,
        )
        self.scheduler = Scheduler(limits, runner.copy_block, offload)
        self._tokenizer = tokenizer
        self._runner = runner
        self._vocabulary = vocabulary
        self._offload = offload
        self._live: dict[int, LiveRequest] = {}
        self._ended: list[int] = []
        self._unheard: list[tuple[LiveRequest, GreenroomError]] = []
        self._expected: tuple[list[Planned], list[SequenceChunk]] | None = None  # planned ahead; what the runner knows
        self._failures = 0  # passes in a row
        self._counts = _Counts()

    @property
    def busy(self) -> bool:
        """Whether ``step`` has something to do or to wait for."""
        return bool(self._live) or self.scheduler.transferring

    def add(self, accepted: Accepted) -> None:
        """Takes a request, from now until its last event."""
        live = LiveRequest(accepted, self._tokenizer)
        self._live[live.request_id] = live
        try:
            self.scheduler.add(live.sequence, live.max_length)
        except GreenroomError as error:
            live.fail(error)
            self._retire(live)

    def cancel(self, request_id: int) -> None:
        """Ends a request, unless it has ended."""
        if (live := self._live.get(request_id)) is not None:
            live.finish(FinishReason.CANCELLED)
            self._retire(live)

    def cancel_all(self) -> None:
        """Ends all requests."""
        for request_id in [*self._live]:
            self.cancel(request_id)

    def fail_all(self, error: GreenroomError) -> None:
        """All requests end with ``error``."""
        for live in [*self._live.values()]:
            live.fail(error)
            self._retire(live)

    @property
    def has_ended(self) -> bool:
        """Whether ``take_ended`` has something to say."""
        return bool(self._ended)

    def take_ended(self) -> list[int]:
        """Requests that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def step(self, meanwhile: Callable[[], None] | None = None) -> None:
        """One pass, or a short wait if transfers have to end first.

        Args:
            meanwhile: called once unless the pass fails: while the device computes, as far as it does without the
                host. It must not raise.

        Raises:
            EngineError: several passes in a row failed: the runner is of no more use.
        """
        planned = self.scheduler.plan()
        if not planned:
            self._deliver()
            self._end_unheard()
            if meanwhile is not None:
                meanwhile()
            if self._offload is not None and self.scheduler.transferring:
                self._offload.wait(_TRANSFER_WAIT_S)
            return
        start = time.perf_counter()
        try:
            choices, failed = self._run(planned, meanwhile)
        except Exception as error:
            self._pass_failed(planned, error)
            return
        self._failures = 0
        self._counts.steps += 1
        self._counts.step_seconds += time.perf_counter() - start
        self.scheduler.passed(planned)
        self._end_unheard()
        for live, problem in failed:
            if live.ended is None:
                self._fail(live, problem)
        for live, choice in choices:
            if live.ended is None:
                self._take(live, choice)

    def stats(self) -> EngineStats:
        """Counts so far."""
        scheduler, counts = self.scheduler, self._counts
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.loading),
            finished=dict(counts.finished),
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=counts.completion_tokens,
            cached_tokens=counts.cached_tokens,
            loaded_tokens=scheduler.loaded_tokens,
            preemptions=scheduler.preemptions,
            kv_blocks=scheduler.pool.num_blocks,
            kv_blocks_used=scheduler.pool.used,
            steps=counts.steps,
            step_seconds=counts.step_seconds,
            kv_offload=self._offload.stats() if self._offload is not None else None,
        )

    def _run(
        self, planned: list[Planned], meanwhile: Callable[[], None] | None
    ) -> tuple[list[tuple[LiveRequest, Choice]], list[tuple[LiveRequest, GreenroomError]]]:
        """A forward pass and the choices behind it; besides, requests whose constraints failed meanwhile."""
        draft, problems = Draft(planned), []

        def during() -> None:
            """While the device computes, clients get the tokens of the pass before, and constraints think."""
            self._deliver()
            draft.describe(self._live, self._vocabulary)
            if meanwhile is not None:
                meanwhile()

        def behind(logits: torch.Tensor) -> None:
            """Still before the pass ends: the choices behind it are enqueued, and the next one is planned."""
            try:
                draft.begin(logits)
                if not draft.failed:
                    self._work_ahead(planned)
            except Exception as error:  # the pass must not end with it
                problems.append(error)

        self._runner.run(self._chunks(planned), during, behind)
        for problem in problems:
            raise problem
        return draft.result(), draft.failed

    def _work_ahead(self, planned: list[Planned]) -> None:
        """Makes the next pass ready, in case that all of this one go on and nobody comes."""
        if self._unheard or any(self._live[item.sequence.order].nearly_done for item in planned):
            return
        if (ahead := self.scheduler.plan_ahead(planned)) is not None:
            self._expected = ahead, [item.chunk for item in ahead]
            self._runner.expect(self._expected[1])

    def _chunks(self, planned: list[Planned]) -> list[SequenceChunk]:
        """What the runner expects, if the pass is the one that was planned ahead."""
        expected, self._expected = self._expected, None
        if expected is not None and expected[0] is planned:
            return expected[1]
        return [item.chunk for item in planned]

    def _deliver(self) -> None:
        """Delivers what is due. Whoever does not take it is ended between passes: one that runs may use its blocks."""
        for live in self._live.values():
            try:
                live.deliver()
            except GreenroomError as error:
                self._unheard.append((live, error))

    def _end_unheard(self) -> None:
        unheard, self._unheard = self._unheard, []
        for live, problem in unheard:
            if live.ended is None:
                self._fail(live, problem)

    def _take(self, live: LiveRequest, choice: Choice) -> None:
        first = live.completion_tokens == 0
        try:
            live.take(choice, self.scheduler.append)
        except GreenroomError as error:
            live.fail(error)
        if first:
            self._counts.prompt_tokens += live.sequence.prompt_tokens
            self._counts.cached_tokens += live.sequence.cached_tokens or 0
        self._counts.completion_tokens += choice.token is not None
        if live.ended is not None:
            self._retire(live)

    def _pass_failed(self, planned: Sequence[Planned], error: Exception) -> None:
        """Those in the pass end with it, the others go on."""
        reported = error if isinstance(error, EngineError) else EngineError(f"a forward pass failed: {error!r}")
        for item in planned:
            self._fail(self._live[item.sequence.order], reported)
        self._failures += 1
        if self._failures >= _FAILURES_IN_A_ROW:
            raise EngineError(
                f"{self._failures} forward passes in a row failed, the engine ends; the last one: {reported}"
            ) from error

    def _fail(self, live: LiveRequest, error: GreenroomError) -> None:
        live.fail(error)
        self._retire(live)

    def _retire(self, live: LiveRequest) -> None:
        """Gives back what an ended request has."""
        assert live.ended is not None
        reason = "failed" if isinstance(live.ended, Failed) else live.ended.reason.value
        self._counts.finished[reason] = self._counts.finished.get(reason, 0) + 1
        self.scheduler.finish(live.sequence)
        del self._live[live.request_id]
        self._ended.append(live.request_id)
