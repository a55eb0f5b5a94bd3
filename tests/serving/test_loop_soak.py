"""EngineLoop for a long time in little memory: blocks run out, come back from host memory, are taken from others."""

import random

import pytest

from greenroom.errors import EngineError
from greenroom.serving.loop import EngineLoop
from greenroom.serving.requests import Failed, Finished, FinishReason, SamplingParams
from tests.reference.slow_runner import SlowExclusiveRunner, SlowOffload, SlowRunner
from tests.reference.tokenizer import VOCAB, make_tokenizer
from tests.serving.drive import Listener, accepted, alone

TOKENIZER = make_tokenizer()


def random_request(dice: random.Random) -> tuple[list[int], SamplingParams, int]:
    prompt = [40 + dice.randrange(3)] * dice.choice([0, 4, 8, 13]) + [50 + dice.randrange(2)] * dice.randint(1, 6)
    params = SamplingParams(
        temperature=dice.choice([0, 1.3]), presence_penalty=dice.choice([0, 1]), ignore_eos=dice.random() < 0.5
    )
    return prompt, params, dice.randint(1, 25)


class Soak:
    def __init__(self, runner, offload, seed: int, chat: bool = False) -> None:
        """chat: half of the requests go on where another one ended."""
        self.chat = chat
        self.runner, self.offload, self.dice = runner, offload, random.Random(seed)
        self.loop = EngineLoop(TOKENIZER, runner, VOCAB, runner.max_tokens, offload)
        self.requests: list[tuple] = []
        self.lost: set[int] = set()  # cancelled, or in a pass that failed

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.act()
            self.step()
        self.runner.fail_next = None
        for _ in range(10_000):
            if not self.loop.busy:
                break
            self.step()
        assert not self.loop.busy
        self.check_all()

    def act(self) -> None:
        dice = self.dice
        if dice.random() < 0.4:
            prompt, params, max_new = random_request(dice)
            if self.chat and dice.random() < 0.5:
                prompt, max_new = self.turn() or prompt, 6
            number, listener = len(self.requests), Listener()
            self.requests.append((prompt, params, max_new, listener))
            self.loop.add(accepted(number, prompt, params, listener, None, max_new))
        if dice.random() < 0.03 and self.requests:
            number = dice.randrange(len(self.requests))
            self.lost.add(number)
            self.loop.cancel(number)
        if dice.random() < 0.01:
            self.runner.fail_next = EngineError("a bad pass")
        while self.offload is not None and self.offload.jobs and dice.random() < 0.3:
            self.offload.end(dice.choice(sorted(self.offload.jobs)), well=dice.random() < 0.9)

    def turn(self) -> list[int] | None:
        """Prompt and answer of an ended request, and a new token."""
        ended = [
            [*prompt, *listener.tokens]
            for prompt, _, _, listener in self.requests
            if listener.last is not None and len(prompt) + len(listener.tokens) < 36
        ]
        return [*self.dice.choice(ended), 60] if ended else None

    def step(self) -> None:
        self.loop.step()
        self.loop._failures = 0
        self.loop.scheduler.check()

    def check_all(self) -> None:
        for number, (prompt, params, max_new, listener) in enumerate(self.requests):
            expected = alone(prompt, params, number, max_new, VOCAB)
            if isinstance(listener.last, Failed):
                assert "a bad pass" in str(listener.last.error)
                assert listener.tokens == expected[: len(listener.tokens)]
            elif number in self.lost and listener.last.reason == FinishReason.CANCELLED:
                assert listener.tokens == expected[: len(listener.tokens)]
            else:
                assert isinstance(listener.last, Finished)
                assert listener.tokens == expected
        assert self.loop.scheduler.pool.used == 0


@pytest.mark.parametrize("seed", range(3))
def test_little_memory_and_host_memory(seed) -> None:
    runner = SlowRunner(12, 4, 5, 16, VOCAB)
    soak = Soak(runner, SlowOffload(runner, 12), seed)
    soak.run(350)
    stats = soak.loop.stats()
    assert stats.preemptions > 5
    assert stats.loaded_tokens > 50
    assert stats.cached_tokens > 50
    assert runner.copied
    assert set(stats.finished) == {"stop", "length", "cancelled", "failed"}


def test_chats() -> None:
    """Ends of requests begin others: on the device, and from host memory."""
    runner = SlowRunner(12, 4, 5, 16, VOCAB)
    soak = Soak(runner, SlowOffload(runner, 60), 3, chat=True)
    soak.run(300)
    assert runner.copied
    assert soak.offload.loaded_parts > 5


def test_no_host_memory() -> None:
    soak = Soak(SlowRunner(12, 4, 5, 16, VOCAB), None, 5)
    soak.run(350)
    assert soak.loop.stats().preemptions > 5


def test_one_sequence_at_a_time() -> None:
    soak = Soak(SlowExclusiveRunner(num_blocks=12, max_tokens=7, vocabulary=VOCAB), None, 6)
    soak.run(350)
    stats = soak.loop.stats()
    assert stats.preemptions == stats.cached_tokens == len(soak.runner.copied) == 0
    assert max(max(chunks) for chunks in soak.runner.passes) == 7
