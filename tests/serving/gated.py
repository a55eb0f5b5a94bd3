"""A serving engine over a runner that computes hashes and waits where a test wants it to."""

import threading
import time
from collections.abc import Callable

from greenroom.serving.requests import Failed, Finished, Piece, SamplingParams
from tests.reference.slow_runner import SlowRunner
from tests.reference.tokenizer import make_tokenizer
from tests.serving.drive import Listener

TOKENIZER = make_tokenizer()
WAIT_S = 30


class GatedRunner(SlowRunner):
    """Passes wait for a permission each while the gate is closed."""

    def __init__(self, **knobs) -> None:
        super().__init__(**knobs)
        self.open = threading.Event()
        self.open.set()
        self.permits = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)

    def run(self, chunks, meanwhile=None, behind=None):
        self.entered.release()
        while not self.open.is_set() and not self.permits.acquire(timeout=0.01):
            pass
        return super().run(chunks, meanwhile, behind)


class Client(Listener):
    """A listener that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()
        self.began = threading.Event()
        self.errors: list[BaseException] = []

    def __call__(self, event) -> None:
        try:
            super().__call__(event)
        except BaseException as error:
            self.errors.append(error)
            raise
        self.began.set()
        if not isinstance(event, Piece):
            self.ended.set()

    def result(self) -> Finished | Failed:
        assert self.ended.wait(WAIT_S), "the request never ended"
        assert not self.errors
        return self.last


def ask(engine, prompt=(50, 51), constraint=None, client=None, **knobs) -> tuple[Client, object]:
    client = client or Client()
    knobs = {"temperature": 0, "max_tokens": 10} | knobs
    return client, engine.submit(prompt, SamplingParams(**knobs), client, constraint)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)
