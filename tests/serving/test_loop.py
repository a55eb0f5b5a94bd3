"""EngineLoop under random arrivals, cancellations, failures and transfers: every request gets what it gets alone."""

from dataclasses import dataclass
from functools import cached_property

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from greenroom.errors import EngineError
from greenroom.serving.loop import EngineLoop
from greenroom.serving.requests import Failed, Finished, FinishReason, SamplingParams
from tests.reference.slow_runner import SlowOffload, SlowRunner
from tests.reference.tokenizer import VOCAB, make_tokenizer
from tests.serving.drive import Allow, Listener, accepted, alone

TOKENIZER = make_tokenizer()
GREEDY = SamplingParams(temperature=0)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), tuple(range(100, 140))]),
)
# Two letters and one of three beginnings: prefixes are often shared.
prompts = st.builds(
    lambda head, tail: [40 + head] * (4 * head) + [50 + letter for letter in tail],
    st.integers(0, 3),
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
)


@dataclass
class Sent:
    prompt: list[int]
    params: SamplingParams
    seed: int
    max_new: int
    listener: Listener
    may_fail: bool = False

    @cached_property
    def expected(self) -> list[int]:
        return alone(self.prompt, self.params, self.seed, self.max_new, VOCAB)


class LoopMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(9, 16),
        max_sequences=st.integers(2, 5),
        max_tokens=st.integers(5, 24),
        room=st.none() | st.integers(0, 20),
    )
    def begin(self, num_blocks, max_sequences, max_tokens, room) -> None:
        self.runner = SlowRunner(num_blocks, 4, max_sequences, max_tokens, VOCAB)
        self.offload = None if room is None else SlowOffload(self.runner, room)
        self.loop = EngineLoop(TOKENIZER, self.runner, VOCAB, max_tokens, self.offload)
        self.sent: list[Sent] = []

    @rule(prompt=prompts, params=params, seed=st.integers(0, 3), max_new=st.integers(1, 12))
    def submit(self, prompt, params, seed, max_new) -> None:
        request = Sent(prompt, params, seed, max_new, Listener())
        self.loop.add(accepted(len(self.sent), prompt, params, request.listener, None, max_new, seed))
        self.sent.append(request)

    @rule(prompt=prompts, broken=st.sampled_from(["allowed", "accept", "finished"]))
    def submit_with_a_broken_constraint(self, prompt, broken) -> None:
        request = Sent(prompt, GREEDY, 0, 4, Listener(), may_fail=True)
        constraint = Allow(range(VOCAB), VOCAB, broken)
        self.loop.add(accepted(len(self.sent), prompt, GREEDY, request.listener, constraint, 4, 0))
        self.sent.append(request)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        which = data.draw(st.integers(0, len(self.sent) - 1))
        before = self.sent[which].listener.last
        self.loop.cancel(which)
        last = self.sent[which].listener.last
        assert last == before if before is not None else last.reason == FinishReason.CANCELLED

    @rule(count=st.integers(1, 6))
    def step(self, count) -> None:
        for _ in range(count):
            self.loop.step()
            self.loop.scheduler.check()

    @rule()
    def fail_a_pass(self) -> None:
        passes = len(self.runner.passes)
        self.runner.fail_next = EngineError("as the test wants it")
        running = [request for request in self.sent if request.listener.last is None]
        self.loop.step()
        self.runner.fail_next = None
        if len(self.runner.passes) > passes:
            failed = [r for r in running if isinstance(r.listener.last, Failed)]
            assert len(failed) == len(self.runner.passes[-1])
            for request in failed:
                assert "as the test wants it" in str(request.listener.last.error)
                request.may_fail = True
        self.loop._failures = 0  # that many in a row are another test's business

    @precondition(lambda self: self.offload is not None and self.offload.jobs)
    @rule(data=st.data(), well=st.booleans())
    def end_a_transfer(self, data, well) -> None:
        self.offload.end(data.draw(st.sampled_from(sorted(self.offload.jobs))), well)

    @invariant()
    def nothing_is_wrong(self) -> None:
        self.loop.scheduler.check()
        for request in self.sent:
            check(request)

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for _ in range(2000):
            if not self.loop.busy:
                break
            self.loop.step()
            self.loop.scheduler.check()
        assert all(request.listener.last is not None for request in self.sent), "a request was forgotten"
        assert not self.loop.busy
        for request in self.sent:
            check(request)
        stats = self.loop.stats()
        assert stats.kv_blocks_used == stats.running == stats.waiting == 0
        assert sum(stats.finished.values()) == len(self.sent)
        assert sorted(self.loop.take_ended()) == [*range(len(self.sent))]


def check(request: Sent) -> None:
    """The tokens so far are those that the request gets alone, and all of them if it finished."""
    tokens, last, expected = request.listener.tokens, request.listener.last, request.expected
    assert tokens == expected[: len(tokens)]
    if isinstance(last, Failed):
        assert request.may_fail
    elif isinstance(last, Finished) and last.reason != FinishReason.CANCELLED:
        assert tokens == expected
        assert last.prompt_tokens == len(request.prompt)
        assert last.cached_tokens < len(request.prompt)
        full = len(expected) == request.max_new and expected[-1] not in (*request.params.stop_token_ids, 2)
        assert last.reason == (FinishReason.LENGTH if full else FinishReason.STOP) or request.params.ignore_eos


LoopMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestLoop = LoopMachine.TestCase
