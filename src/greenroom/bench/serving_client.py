"""A client of an engine that notes when it gets its tokens."""

import threading
import time
from collections.abc import Callable

from greenroom.errors import EngineError
from greenroom.serving.engine import ServingEngine
from greenroom.serving.requests import Event, Failed, Finished, Piece, SamplingParams

_LIMIT_S = 300.0


class Client:
    """One greedy request of ``max_tokens`` tokens, and when it got each of them."""

    def __init__(self, engine: ServingEngine, prompt: list[int], max_tokens: int) -> None:
        self.times: list[float] = []
        self._changed = threading.Condition()
        self._end: Finished | Failed | None = None
        self.started = time.perf_counter()
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self._handle = engine.submit(prompt, params, self._take)

    def wait_for(self, tokens: int) -> None:
        """Until it has got so many.

        Raises:
            EngineError: it ends before.
        """
        self._wait(lambda: len(self.times) >= tokens)
        if len(self.times) < tokens:
            raise EngineError("a request ended before its measurement did")

    def wait_for_end(self) -> None:
        self._wait(lambda: False)

    def cancel(self) -> None:
        self._handle.cancel()

    def _wait(self, enough: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._end is not None or enough(), _LIMIT_S):
                raise EngineError(f"a request got nothing for {_LIMIT_S:.0f} s")
        if isinstance(self._end, Failed):
            raise self._end.error

    def _take(self, event: Event) -> None:
        now = time.perf_counter()
        with self._changed:
            if isinstance(event, Piece):
                self.times.append(now)
            else:
                self._end = event
            self._changed.notify_all()
