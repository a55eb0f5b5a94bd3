"""find_waits beside a comparison of tokens, and whole requests with the same beginnings: the same tokens, less work."""

from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.kv.prefix import block_keys
from greenroom.serving.budget import share_tokens
from greenroom.serving.leaders import Wait, find_waits
from greenroom.serving.loop import EngineLoop
from greenroom.serving.requests import Finished, FinishReason, SamplingParams
from greenroom.serving.sequence import Sequence
from tests.reference.slow_runner import SlowRunner
from tests.reference.tokenizer import VOCAB, make_tokenizer
from tests.serving.drive import Listener, accepted, alone

SIZE = 4
TOKENIZER = make_tokenizer()


def sequence(order, tokens, computed=0, output=0) -> Sequence:
    made = Sequence(order, [*tokens])
    made.prompt_tokens -= output
    made.keys = block_keys(tokens, SIZE)
    made.computed, made.registered = computed, computed // SIZE
    return made


@st.composite
def running(draw) -> list[Sequence]:
    def one(order) -> Sequence:
        # Few different tokens, long runs of the same: beginnings agree, and end anywhere.
        tokens = [0] * draw(st.integers(0, 14)) + draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
        computed = min(draw(st.sampled_from([0, 0, 4, 5, 8])), len(tokens) - 1)
        return sequence(order, tokens, computed, draw(st.sampled_from([0, 0, 1])))

    return [one(order) for order in range(draw(st.integers(1, 6)))]


def slow_wait(older: Sequence, younger: Sequence) -> tuple[int, int] | None:
    """Tokens for the older one to compute, and those saved; None if neither helps the other."""
    if older.pending == 1 or younger.pending == 1 or older.registered != younger.registered:
        return None
    first = older.registered * SIZE
    same = next((i for i, pair in enumerate(zip(older.tokens, younger.tokens, strict=False)) if len({*pair}) > 1), None)
    if same is None:
        same = min(len(older.tokens), len(younger.tokens))
    end = same // SIZE * SIZE
    if end <= first:
        whole = older.tokens == younger.tokens
        in_prompt = all(len(each.tokens) == each.prompt_tokens for each in (older, younger))
        if not (whole and in_prompt):
            return None
        end = len(older.tokens)
    return end - older.computed, min(end, len(younger.tokens) - 1) - younger.computed


@given(running())
@settings(max_examples=500)
def test_the_oldest_that_needs_the_same_block_leads(sequences) -> None:
    expected: dict[int, Wait] = {}
    for place, younger in enumerate(sequences):
        for leader, older in enumerate(sequences[:place]):
            if leader not in expected and (found := slow_wait(older, younger)) is not None:
                expected[place] = Wait(leader, *found)
                break
    assert find_waits(sequences, SIZE) == expected
    assert all(wait.saves >= 1 and wait.tokens >= 1 for wait in expected.values())


def test_ends_that_are_not_full() -> None:
    whole = [0, 1, 2, 3, 8, 9]
    assert find_waits([sequence(0, whole, 4), sequence(1, whole, 4)], SIZE) == {1: Wait(0, 2, 1)}
    assert find_waits([sequence(0, whole, 4), sequence(1, [7, *whole[1:]], 4)], SIZE) == {}  # other tokens before
    assert find_waits([sequence(0, whole, 4), sequence(1, [*whole, 7], 4)], SIZE) == {}
    outputs = [sequence(order, whole, 4, output=1) for order in range(2)]  # their ends are not left to others
    assert find_waits(outputs, SIZE) == {}


@given(running(), st.integers(8, 40))
@settings(max_examples=500)
def test_shares(sequences, budget) -> None:
    pending = [each.pending for each in sequences]
    waits = find_waits(sequences, SIZE)
    shares = share_tokens(pending, budget, waits)
    assert sum(shares) <= budget
    assert all(0 <= share <= most for share, most in zip(shares, pending, strict=True))
    assert all(share == 1 for share, most in zip(shares, pending, strict=True) if most == 1)
    for place, wait in waits.items():
        if shares[place]:  # whoever waits takes only what is left
            assert 2 * wait.saves < pending[place]
            assert shares[wait.leader] == pending[wait.leader]
    plain = share_tokens(pending, budget)
    for place, wait in waits.items():  # and had it not waited, the part in common would not be there sooner
        assert shares[wait.leader] >= min(plain[place], wait.tokens)
    if sum(shares) < budget:
        assert all(shares[place] == most for place, most in enumerate(pending) if place not in waits)


REQUEST = st.tuples(
    st.sampled_from([0, 6, 16, 29]),  # tokens of a beginning that all have
    st.sampled_from([[], [], [60], [60, 61, 62, 63, 64], [70] * 18]),
    st.integers(0, 6),  # pass in which it comes
    st.sampled_from([None] * 4 + [1, 2, 4]),  # passes until it is cancelled
)


@given(
    st.lists(REQUEST, min_size=2, max_size=7),
    st.sampled_from([10, 13, 32, 100]),
    st.integers(3, 6),
    st.sampled_from([14, 200]),
)
@settings(max_examples=150, deadline=None)
def test_requests_with_the_same_beginnings_get_what_each_gets_alone(requests, budget, seats, blocks) -> None:
    requests = sorted(requests, key=lambda request: request[2])
    runner = SlowRunner(blocks, SIZE, seats, budget, VOCAB)
    loop = EngineLoop(TOKENIZER, runner, VOCAB, budget)
    params, listeners = SamplingParams(temperature=0, ignore_eos=True), {}
    prompts = [[50 + place for place in range(shared)] + own or [50] for shared, own, _, _ in requests]
    most = 10 + sum(len(prompt) + 3 for prompt in prompts)  # no pass computes nothing
    if blocks < 200:
        most *= 2  # some give up what they have computed
    for now in range(most):
        for number, (_, _, arrives, lives) in enumerate(requests):
            if arrives == now:
                listeners[number] = Listener()
                loop.add(accepted(number, prompts[number], params, listeners[number], None, 3))
            elif lives is not None and arrives + lives == now:
                loop.cancel(number)
        prompting = {each.order: each.pending for each in loop.scheduler.running if each.pending > 1}
        before = len(runner.passes)
        loop.step()
        loop.scheduler.check()
        if loop.scheduler.running:
            assert len(runner.passes) == before + 1
        if prompting and blocks == 200:  # whoever is the oldest goes on, by its own work or that of others
            oldest = min(prompting)
            left = next((each.pending for each in loop.scheduler.running if each.order == oldest), 0)
            assert left < prompting[oldest]
        if now > 6 and not loop.busy:
            break
    assert not loop.busy
    for number, listener in listeners.items():
        expected = alone(prompts[number], params, number, 3, VOCAB)
        assert isinstance(listener.last, Finished)
        if listener.last.reason == FinishReason.CANCELLED:
            assert listener.tokens == expected[: len(listener.tokens)]
        else:
            assert listener.tokens == expected


def test_four_outputs_of_one_prompt() -> None:
    for budget in (40, 128, 2048):
        runner = SlowRunner(400, 16, 8, budget, VOCAB)
        loop = EngineLoop(TOKENIZER, runner, VOCAB, budget)
        prompt, params, listeners = [3 + place % 50 for place in range(300)], SamplingParams(temperature=1), []
        for number in range(4):
            listeners.append(Listener())
            loop.add(accepted(number, prompt, params, listeners[number], None, 1))
        while loop.busy:
            loop.step()
            loop.scheduler.check()
        assert sum(map(sum, runner.passes)) == 300 + 3
        assert [listener.last.cached_tokens for listener in listeners] == [0, 299, 299, 299]
        assert loop.stats().prompt_tokens - loop.stats().cached_tokens == 303
        assert [listener.tokens for listener in listeners] == [alone(prompt, params, i, 1, VOCAB) for i in range(4)]


def test_a_long_beginning_that_many_have() -> None:
    runner = SlowRunner(400, 16, 8, 512, VOCAB)
    loop = EngineLoop(TOKENIZER, runner, VOCAB, 512)
    for number in range(8):
        prompt = [3 + place % 50 for place in range(264)] + [60 + number] * 20
        loop.add(accepted(number, prompt, SamplingParams(temperature=0), Listener(), None, 1))
    loop.step()
    loop.step()
    assert not loop.busy
    # 264 are 16 blocks and half a one, which is copied.
    assert runner.passes == [[284], [20] * 7]
