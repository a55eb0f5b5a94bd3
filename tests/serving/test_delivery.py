"""When clients get their tokens: while the next pass runs, and at once where that decides something."""

import pytest
import torch

from greenroom.errors import EngineError
from greenroom.serving.loop import EngineLoop
from greenroom.serving.requests import Failed, Finished, FinishReason, SamplingParams
from tests.reference.slow_runner import SlowRunner
from tests.reference.tokenizer import VOCAB, make_tokenizer
from tests.serving.drive import Allow, Listener, accepted, alone

TOKENIZER = make_tokenizer()
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


class WatchedRunner(SlowRunner):
    """Looks at the scheduler while a pass runs, before and behind ``meanwhile``; may fail behind it."""

    def __init__(self) -> None:
        super().__init__(num_blocks=20, vocabulary=VOCAB)
        self.loop: EngineLoop | None = None
        self.fail_behind: Exception | None = None
        self.heard = lambda: 0
        self.counts: list[tuple[int, int]] = []

    def run(self, chunks, meanwhile=None, behind=None):
        def watched() -> None:
            before = self.heard()
            meanwhile()
            self.counts.append((before, self.heard()))
            self.loop.scheduler.check()
            in_pass = {block for chunk in chunks for block in chunk.blocks}
            assert in_pass <= self.used(), "blocks of a pass were given back"
            if self.fail_behind is not None:
                error, self.fail_behind = self.fail_behind, None
                raise error

        return super().run(chunks, watched, behind)

    def used(self) -> set[int]:
        pool = self.loop.scheduler.pool
        return {block for block in range(self.num_blocks) if pool.references(block)}


class Deaf(Listener):
    """Fails at its second token."""

    def __call__(self, event) -> None:
        if len(self.tokens) == 1 and not isinstance(event, Failed):
            raise KeyError("no client")
        super().__call__(event)


@pytest.fixture
def loop() -> EngineLoop:
    runner = WatchedRunner()
    runner.loop = EngineLoop(TOKENIZER, runner, VOCAB, 16)
    return runner.loop


def run_out(loop: EngineLoop) -> None:
    for _ in range(50):
        if loop.busy:
            loop.step()
    assert not loop.busy
    assert loop.stats().kv_blocks_used == 0


def test_tokens_come_while_the_next_pass_runs(loop):
    listener = Listener()
    loop._runner.heard = lambda: len(listener.tokens)
    loop.add(accepted(0, [50, 51], GREEDY, listener, max_new=4))
    run_out(loop)
    assert loop._runner.counts == [(0, 0), (0, 1), (1, 2), (2, 3)], "the last one, which ends the output, comes at once"
    assert listener.tokens == alone([50, 51], GREEDY, 0, 4, VOCAB)
    assert listener.text == TOKENIZER.decode(listener.tokens, skip_special_tokens=True)
    assert listener.last == Finished(FinishReason.LENGTH, 2, 4, 0)


def test_a_text_that_may_end_the_output_is_looked_at_at_once(loop):
    listener, params = Listener(), SamplingParams(temperature=0, ignore_eos=True, stop=("never",))
    loop.add(accepted(0, [50, 51], params, listener, max_new=4))
    for count in range(1, 4):
        loop.step()
        assert len(listener.tokens) == count
    run_out(loop)


def test_a_cancelled_request_gets_what_was_due(loop):
    listener = Listener()
    loop.add(accepted(0, [50, 51], GREEDY, listener, max_new=9))
    loop.step()
    assert listener.tokens == []
    loop.cancel(0)
    assert listener.last == Finished(FinishReason.CANCELLED, 2, 1, 0)
    assert listener.tokens == alone([50, 51], GREEDY, 0, 1, VOCAB)


def test_nothing_stays_due_when_nothing_can_run(loop):
    listener, plan = Listener(), loop.scheduler.plan
    loop.add(accepted(0, [50, 51], GREEDY, listener, max_new=3))
    loop.step()
    loop.scheduler.plan = list
    loop.step()
    assert len(listener.tokens) == 1
    loop.scheduler.plan = plan
    run_out(loop)
    assert listener.tokens == alone([50, 51], GREEDY, 0, 3, VOCAB)


@pytest.mark.parametrize("constraint", [None, "allowed"])
def test_a_listener_that_fails_within_a_pass_ends_behind_it(loop, constraint):
    deaf, good = Deaf(), Listener()
    broken = None if constraint is None else Allow(range(VOCAB), VOCAB)
    loop.add(accepted(0, [50, 51], GREEDY, deaf, broken, max_new=9))
    loop.add(accepted(1, [60, 61], GREEDY, good, max_new=9))
    for _ in range(2):
        loop.step()
    if broken is not None:
        broken._broken = constraint  # fails in the pass in which the listener does
    run_out(loop)
    assert isinstance(deaf.last, Failed)
    assert "no client" in str(deaf.last.error)
    assert len(deaf.tokens) == 1
    assert good.tokens == alone([60, 61], GREEDY, 1, 9, VOCAB)
    assert loop.stats().finished == {"failed": 1, "length": 1}


def test_choices_that_cannot_be_enqueued_end_the_pass_and_not_the_runner(loop, monkeypatch):
    listener, later = Listener(), Listener()
    loop.add(accepted(0, [50, 51], GREEDY, listener, max_new=9))
    loop.step()

    def no_memory(logits, rows):
        raise torch.OutOfMemoryError("no memory")

    own, ran = loop._runner.run, []
    loop._runner.run = lambda *args: ran.append(own(*args))  # with nothing raised
    with monkeypatch.context() as patch:
        patch.setattr("greenroom.serving.draft.begin", no_memory)
        loop.step()
    assert len(ran) == 1
    assert "a forward pass failed: OutOfMemoryError('no memory')" in str(listener.last.error)
    assert listener.tokens == alone([50, 51], GREEDY, 0, 1, VOCAB)
    loop._runner.run = own
    loop.add(accepted(1, [60, 61], GREEDY, later, max_new=3))
    run_out(loop)
    assert later.tokens == alone([60, 61], GREEDY, 1, 3, VOCAB)


def test_a_listener_and_its_pass_may_both_fail(loop):
    deaf, later = Deaf(), Listener()
    loop.add(accepted(0, [50, 51], GREEDY, deaf, max_new=9))
    for _ in range(2):
        loop.step()
    loop._runner.fail_behind = EngineError("layer 3 did not answer")
    loop.step()
    assert str(deaf.last.error) == "layer 3 did not answer"
    loop.add(accepted(1, [60, 61], GREEDY, later, max_new=3))
    run_out(loop)
    assert later.tokens == alone([60, 61], GREEDY, 1, 3, VOCAB)
    assert sorted(loop.take_ended()) == [0, 1]
