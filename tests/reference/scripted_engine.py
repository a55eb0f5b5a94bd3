"""An ``Engine`` that says what it is told to, token by token, with delays and failures."""

import threading
from collections.abc import Callable, Sequence

from greenroom.errors import EngineError, GreenroomError, QueueFullError
from greenroom.serving.params import check_params, check_prompt
from greenroom.serving.requests import EngineStats, Failed, Finished, FinishReason, OnEvent, Piece, SamplingParams
from tests.reference.tokenizer import VOCAB, make_tokenizer


class ScriptedEngine:
    """Each request gets a thread.

    Attributes:
        reply: the text that follows a prompt.
        gate: closed, no token comes.
        fail_after: tokens after which requests fail; None for never.
        capacity: requests at once; more are refused.
        cancelled: requests that ended by ``cancel``.
    """

    context_length = 400
    vocabulary = VOCAB

    def __init__(self, reply: Callable[[str], str] = str.upper) -> None:
        self.tokenizer = make_tokenizer()
        self.reply = reply
        self.gate = threading.Event()
        self.gate.set()
        self.fail_after: int | None = None
        self.failure: GreenroomError = EngineError("layer 3 is broken")
        self.capacity = 100
        self.cancelled = 0
        self.refuses = False
        self.params: list[SamplingParams] = []
        self.prompts: list[tuple[int, ...]] = []
        self.counts = {"prompt": 0, "completion": 0}
        self.finished: dict[str, int] = {}
        self._lock = threading.Lock()
        self._live: dict[int, threading.Event] = {}
        self._threads: list[threading.Thread] = []

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, on_event: OnEvent, constraint=None):
        check_params(params, self.vocabulary)
        max_new = check_prompt(prompt_ids, params, self.context_length, self.vocabulary)
        with self._lock:
            if self.refuses:
                raise EngineError("the engine takes no more requests")
            if len(self._live) >= self.capacity:
                raise QueueFullError("too many requests wait; try again later")
            number = len(self._threads)
            stop = self._live[number] = threading.Event()
            self.params.append(params)
            self.prompts.append(tuple(prompt_ids))
            arguments = (number, prompt_ids, max_new, on_event)
            thread = threading.Thread(target=self._serve, args=arguments, daemon=True)
            self._threads.append(thread)
        thread.start()
        return _Handle(number, stop.set)

    def stats(self) -> EngineStats:
        with self._lock:
            live = len(self._live)
            return EngineStats(
                live,
                0,
                dict(self.finished),
                self.counts["prompt"],
                self.counts["completion"],
                0,
                0,
                0,
                64,
                live,
                1,
                0.5,
            )

    def drain(self, timeout_s: float) -> bool:
        self.refuses = True
        for thread in self._threads:
            thread.join(timeout_s)
        return not self._live

    def close(self) -> None:
        self.refuses = True
        for stop in list(self._live.values()):
            stop.set()
        for thread in self._threads:
            thread.join()

    def _serve(self, number: int, prompt: Sequence[int], max_new: int, on_event: OnEvent) -> None:
        tokens = self.tokenizer(self.reply(self.tokenizer.decode(prompt)))["input_ids"]
        reason, sent = FinishReason.STOP, 0
        for sent, token in enumerate(tokens):
            while not (self.gate.wait(0.002) or self._live[number].is_set()):
                pass
            if self._live[number].is_set():
                reason = FinishReason.CANCELLED
                break
            if sent == self.fail_after:
                self._end(number, prompt, sent, "failed")
                on_event(Failed(self.failure))
                return
            if sent == max_new:
                reason = FinishReason.LENGTH
                break
            on_event(Piece(self.tokenizer.decode([token]), (token,)))
        else:
            sent = len(tokens)
        self._end(number, prompt, sent, reason.value)
        on_event(Finished(reason, len(prompt), sent, 0))

    def _end(self, number: int, prompt: Sequence[int], sent: int, reason: str) -> None:
        with self._lock:
            del self._live[number]
            self.counts["prompt"] += len(prompt)
            self.counts["completion"] += sent
            self.finished[reason] = self.finished.get(reason, 0) + 1
            self.cancelled += reason == "cancelled"


class _Handle:
    def __init__(self, request_id: int, cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self.cancel = cancel
