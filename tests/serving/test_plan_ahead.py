"""Planning ahead decides nothing: with it and without it, the same passes run over the same blocks."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from greenroom.errors import EngineError
from greenroom.kv.base import Transfers
from greenroom.serving.loop import EngineLoop
from greenroom.serving.requests import FinishReason, SamplingParams
from greenroom.serving.scheduler import Scheduler, SchedulerLimits
from greenroom.serving.sequence import Sequence
from tests.reference.slow_runner import SlowOffload, SlowRunner
from tests.reference.tokenizer import VOCAB, make_tokenizer
from tests.serving.drive import Allow, Listener, accepted, alone
from tests.serving.scheduling import Offload
from tests.serving.test_loop import params, prompts

TOKENIZER = make_tokenizer()
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


class NotingRunner(SlowRunner):
    """Takes down all that it is asked to do."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.asked: list[list[tuple]] = []

    def run(self, chunks, meanwhile=None, behind=None):
        self.asked.append([(chunk.start, [*chunk.token_ids], [*chunk.blocks]) for chunk in chunks])
        return super().run(chunks, meanwhile, behind)


class Side:
    """A loop, which plans ahead or does not."""

    def __init__(self, ahead: bool, num_blocks=12, max_sequences=4, max_tokens=16, room=None) -> None:
        self.runner = NotingRunner(num_blocks, 4, max_sequences, max_tokens, VOCAB)
        self.offload = None if room is None else SlowOffload(self.runner, room)
        self.loop = EngineLoop(TOKENIZER, self.runner, VOCAB, max_tokens, self.offload)
        if self.offload is not None:
            self.offload.wait = lambda timeout_s: None  # would end any job, and not the same on both sides
        self.listeners: list[Listener] = []
        if not ahead:
            self.loop.scheduler.plan_ahead = lambda planned: None

    def add(self, prompt, request_params, max_new, seed=0, broken=None) -> None:
        constraint = Allow(range(VOCAB), VOCAB, broken) if broken is not None else None
        listener = Listener()
        self.loop.add(
            accepted(len(self.listeners), prompt, request_params, listener, constraint, max_new=max_new, seed=seed)
        )
        self.listeners.append(listener)

    def step(self, error=None) -> None:
        self.runner.fail_next = error
        self.loop.step()
        self.runner.fail_next = None
        self.loop._failures = 0
        self.loop.scheduler.check()

    def seen(self) -> list:
        """Everything that a decision could show in."""
        pool = self.loop.scheduler.pool
        jobs = [] if self.offload is None else [job[:3] for job in self.offload.jobs.values()]
        heard = [(listener.tokens, str(listener.last)) for listener in self.listeners]
        stats = replace(self.loop.stats(), step_seconds=0.0)
        return [self.runner.asked, self.runner.copied, jobs, heard, stats, pool._free, [*pool._cached], pool._block_of]


class Machine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(9, 16),
        max_sequences=st.integers(2, 5),
        max_tokens=st.integers(5, 24),
        room=st.none() | st.integers(0, 20),
    )
    def begin(self, **sizes) -> None:
        self.sides = [Side(ahead, **sizes) for ahead in (True, False)]

    @rule(
        prompt=prompts,
        request_params=params,
        seed=st.integers(0, 3),
        max_new=st.integers(1, 30),
        broken=st.sampled_from([None, None, None, "allowed", "accept"]),
    )
    def submit(self, **request) -> None:
        for side in self.sides:
            side.add(**request)

    @rule(data=st.data())
    def cancel(self, data) -> None:
        which = data.draw(st.integers(0, 20))
        for side in self.sides:
            side.loop.cancel(which)

    @rule(count=st.integers(1, 8))
    def step(self, count) -> None:
        for side in self.sides:
            for _ in range(count):
                side.step()

    @rule()
    def fail_a_pass(self) -> None:
        for side in self.sides:
            side.step(EngineError("as the test wants it"))

    @precondition(lambda self: self.sides[0].offload is not None and self.sides[0].offload.jobs)
    @rule(data=st.data(), well=st.booleans())
    def end_a_transfer(self, data, well) -> None:
        job = data.draw(st.sampled_from(sorted(self.sides[0].offload.jobs)))
        for side in self.sides:
            side.offload.end(job, well)

    @invariant()
    def both_sides_are_the_same(self) -> None:
        if hasattr(self, "sides"):
            assert self.sides[0].seen() == self.sides[1].seen()
            assert self.sides[1].runner.expected_passes == 0


Machine.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
TestBothSides = Machine.TestCase


@pytest.fixture
def side() -> Side:
    return Side(ahead=True, num_blocks=40)


def test_all_passes_behind_the_first_are_expected(side) -> None:
    side.add([50, 51], GREEDY, 20)
    side.add([60], GREEDY, 20)
    while side.loop.busy:
        side.step()
    assert len(side.runner.passes) == 20
    # Not the first; nor the one that would come behind the last.
    assert side.runner.expected_passes == 19
    assert side.listeners[0].tokens == alone([50, 51], GREEDY, 0, 20, VOCAB)


def test_in_the_steady_state_blocks_are_taken_from_the_cached() -> None:
    side = Side(ahead=True, num_blocks=8)
    for round_ in range(3):
        before = side.runner.expected_passes
        side.add([50 + round_], GREEDY, 25)
        while side.loop.busy:
            side.step()
        assert side.runner.expected_passes == before + 24
    assert not side.loop.scheduler.pool._free


@pytest.mark.parametrize("what", ["arrival", "cancel", "failure"])
def test_a_pass_is_planned_anew_where_something_happened(side, what) -> None:
    side.add([50, 51], GREEDY, 20)
    side.add([60], GREEDY, 20)
    for _ in range(4):
        side.step()
    before = side.runner.expected_passes
    if what == "arrival":
        side.add([70], GREEDY, 3)
        side.step()
        assert len(side.runner.asked[-1]) == 3
    elif what == "cancel":
        side.loop.cancel(0)
        side.step()
        assert len(side.runner.asked[-1]) == 1
        assert side.listeners[0].last.reason == FinishReason.CANCELLED
    else:
        side.step(EngineError("no"))
        side.add([70], GREEDY, 3)
        before = side.runner.expected_passes
        side.step()
        assert len(side.runner.asked[-1]) == 1
    assert side.runner.expected_passes == before
    side.step()
    assert side.runner.expected_passes == before + 1


def test_those_who_wait_without_a_seat_do_not_keep_it_from_happening() -> None:
    side = Side(ahead=True, num_blocks=40, max_sequences=2)
    for first in (50, 60, 70):
        side.add([first], GREEDY, 10)
    for _ in range(5):
        side.step()
    assert side.runner.expected_passes == 4


class TestScheduler:
    def make(self, num_blocks=8, max_length=20) -> tuple[Scheduler, Sequence]:
        scheduler = Scheduler(SchedulerLimits(4, num_blocks, 4, 16, True), lambda *_: None)
        sequence = Sequence(0, [*range(4)])
        scheduler.add(sequence, max_length)
        return scheduler, sequence

    def test_nothing_changes_until_it_is_followed(self) -> None:
        scheduler, sequence = self.make()
        planned = scheduler.plan()
        free = [*scheduler.pool._free]
        ahead = scheduler.plan_ahead(planned)
        assert ahead is not None
        assert scheduler.pool._free == free
        assert len(sequence.blocks) == 1
        assert [*ahead[0].chunk.blocks] == [sequence.blocks[0], free[-1]]
        scheduler.check()
        scheduler.passed(planned)
        scheduler.append(sequence, 9)
        assert scheduler.plan() is ahead
        assert ahead[0].chunk.token_ids == [9]
        assert [*sequence.blocks] == [*ahead[0].chunk.blocks]
        scheduler.check()

    def test_a_block_that_is_gone_is_not_counted_on(self) -> None:
        scheduler, sequence = self.make()
        planned = scheduler.plan()
        ahead = scheduler.plan_ahead(planned)
        assert ahead is not None
        taken = scheduler.pool.allocate(1)
        scheduler.passed(planned)
        scheduler.append(sequence, 9)
        again = scheduler.plan()
        assert again is not ahead
        assert [*again[0].chunk.blocks] == [*sequence.blocks]
        assert taken[0] not in sequence.blocks

    def test_a_sequence_without_a_new_token_is_not_followed(self) -> None:
        scheduler, sequence = self.make()
        planned = scheduler.plan()
        ahead = scheduler.plan_ahead(planned)
        scheduler.passed(planned)
        scheduler.append(sequence, 8)
        scheduler.append(sequence, 9)
        assert scheduler.plan() is not ahead

    def test_it_cannot_be_said_in_the_middle_of_a_prompt_or_without_blocks(self) -> None:
        scheduler, _ = self.make(num_blocks=1, max_length=4)
        assert scheduler.plan_ahead(scheduler.plan()) is None
        scheduler, _ = self.make()
        scheduler.add(Sequence(1, [*range(50, 70)]), 30)
        assert scheduler.plan_ahead(scheduler.plan()) is None

    def test_a_sequence_that_has_been_loaded_joins(self) -> None:
        offload = Offload()
        scheduler = Scheduler(SchedulerLimits(4, 20, 4, 16, True), lambda *_: None, offload)
        decoding, loaded = Sequence(0, [*range(3)]), Sequence(1, [*range(50, 59)])
        scheduler.add(decoding, 20)
        self.go_on(scheduler, scheduler.plan())
        offload.has = 2
        scheduler.add(loaded, 20)
        planned = scheduler.plan()
        assert scheduler.loading == [loaded]
        ahead = scheduler.plan_ahead(planned)
        assert ahead is not None
        self.go_on(scheduler, planned)
        offload.ended = Transfers(done=(0,))
        assert [item.sequence for item in scheduler.plan()] == [decoding, loaded]

    def go_on(self, scheduler, planned) -> None:
        scheduler.passed(planned)
        for item in planned:
            scheduler.append(item.sequence, 9)
