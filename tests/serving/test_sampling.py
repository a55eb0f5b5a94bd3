"""sample against one request at a time in float64, and its draws against the distribution that they come from."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.serving import sampling
from greenroom.serving.requests import SamplingParams
from greenroom.serving.sampling import Row, begin, sample, uniform
from tests.reference.slow_sampling import choose, log_probabilities, probabilities

VOCABULARY = 45  # not a multiple of 32

tokens = st.integers(0, VOCABULARY - 1)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 5, 44, 1000]),
    min_p=st.sampled_from([0.0, 0.1, 0.9, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.5]),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -1.0]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.0]), max_size=3),
    logprobs=st.sampled_from([None, 0, 1, 7]),
)


@st.composite
def requests(draw):
    prompt, output = draw(st.lists(tokens, min_size=1, max_size=8)), draw(st.lists(tokens, max_size=8))
    allowed = draw(st.none() | st.sets(tokens, min_size=1))
    row = Row(
        draw(params),
        draw(st.integers(0, 2**64 - 1)),
        len(output),
        prompt + output,
        None if allowed is None else bits(allowed),
    )
    return row, allowed


def bits(allowed, vocabulary=VOCABULARY) -> np.ndarray:
    words = np.zeros(math.ceil(vocabulary / 32), dtype=np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words


def random_logits(rows, seed) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.fixture(params=[2048, 1, 7], ids=["ordered whole", "1 candidate", "7 candidates"])
def candidates(request, monkeypatch) -> None:
    """Only so many tokens are ordered, unless they do not decide; blocks of eight."""
    monkeypatch.setattr(sampling, "_CANDIDATES", request.param)
    monkeypatch.setattr("greenroom.serving.draw._BLOCK", 8)


@pytest.mark.usefixtures("candidates")
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(requests(), min_size=1, max_size=6), st.integers(0, 1000), st.booleans())
def test_each_row_is_what_its_request_gets_alone_in_float64(batch, seed, ties) -> None:
    logits = random_logits(len(batch), seed)
    if ties:
        logits = logits.round()
    before = logits.clone()
    choices = sample(logits, [row for row, _ in batch])
    assert torch.equal(logits, before)
    for (row, allowed), values, choice in zip(batch, logits.tolist(), choices, strict=True):
        chances = probabilities(values, row.params, row.tokens, row.position, allowed)
        assert choice.token == choose(chances, uniform(row.seed, row.position))
        check_logprob(row.params.logprobs, values, choice)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_rows_among_themselves_get_what_they_get_beside_others(dtype, device) -> None:
    logits = random_logits(8, 3).round().to(dtype).to(device)  # equal ones are common
    for row, value in enumerate((math.nan, math.inf, -math.inf)):
        logits[row, 5 + row] = value
    logits[3] = -math.inf
    logits[4, :] = math.nan
    greedy, other = Row(SamplingParams(temperature=0), 1, 0, [1]), Row(SamplingParams(logprobs=0), 1, 0, [1])
    alone = sample(logits, [greedy] * 8)
    assert alone == sample(torch.cat([logits, logits[:1]]), [greedy] * 8 + [other])[:8]
    assert [choice.token is None for choice in alone] == [True, True, False, True, True, False, False, False]
    assert alone[5].token == logits[5].tolist().index(logits[5].max().item()), "of equal ones the first"


@pytest.mark.cuda
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 3},
        {"seed": 1},
        {"top_p": 0.5, "top_k": 9, "min_p": 0.1},
        {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
        {"logit_bias": {5: 2.0}},
        {"allowed": True},
    ],
)
def test_to_begin_does_not_wait_for_the_device(params) -> None:
    vocabulary = 151_936
    allowed = np.full(-(-vocabulary // 32), 0xFFFFFFFF, dtype=np.uint32) if params.pop("allowed", False) else None
    rows = [Row(SamplingParams(**params), seed, 2, [1, 2, 3], allowed) for seed in range(16)]
    logits = torch.randn(16, vocabulary, generator=torch.Generator().manual_seed(1)).cuda()
    expected = sample(logits, rows)  # with kernels loaded and memory taken
    late = torch.empty_like(logits)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # half a second
    late.copy_(logits)
    choosing = begin(late, rows)
    assert not torch.cuda.current_stream().query(), "somebody waited"
    assert choosing.result() == expected


def check_logprob(count, logits, choice) -> None:
    if count is None:
        assert choice.logprob is None
        return
    expected = log_probabilities(logits)
    assert choice.logprob.token_id == choice.token
    assert choice.logprob.logprob == pytest.approx(expected[choice.token], abs=1e-4)
    # Of tokens that are equally likely any may come first.
    best = sorted(expected, reverse=True)[:count]
    assert [value for _, value in choice.logprob.top] == pytest.approx(best, abs=1e-4)
    assert [expected[token] for token, _ in choice.logprob.top] == pytest.approx(best, abs=1e-9)
    assert len({token for token, _ in choice.logprob.top}) == len(best)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_devices_and_dtypes(device, dtype) -> None:
    logits = random_logits(4, 3).to(device, dtype)
    rows = [Row(SamplingParams(temperature=t, top_p=0.8, top_k=20), 7, 2, [1, 2, 3]) for t in (0.0, 0.5, 1.0, 2.0)]
    expected = [
        choose(probabilities(values, row.params, row.tokens, row.position), uniform(row.seed, row.position))
        for row, values in zip(rows, logits.float().tolist(), strict=True)
    ]
    assert [choice.token for choice in sample(logits, rows)] == expected


class TestDraws:
    """Chi-square at fixed seeds."""

    DRAWS = 4000

    def drawn(self, params, logits) -> np.ndarray:
        rows = [Row(params, seed, 0, [0]) for seed in range(self.DRAWS)]
        choices = sample(logits.expand(self.DRAWS, -1), rows)
        return np.bincount([choice.token for choice in choices], minlength=VOCABULARY)

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(),
            SamplingParams(temperature=0.6, top_p=0.9),
            SamplingParams(temperature=1.5, top_k=12, min_p=0.05),
        ],
    )
    def test_follow_the_distribution(self, params) -> None:
        logits = random_logits(1, 5)
        chances = np.array(probabilities(logits[0].tolist(), params, [0], 0))
        counts = self.drawn(params, logits)
        assert not counts[chances == 0].any()
        assert chi_square(counts, chances * self.DRAWS) < 1

    def test_the_bound_notices_another_temperature(self) -> None:
        logits = random_logits(1, 5)
        chances = np.array(probabilities(logits[0].tolist(), SamplingParams(temperature=1.2), [0], 0))
        assert chi_square(self.drawn(SamplingParams(), logits), chances * self.DRAWS) > 1

    def test_places_of_one_stream_are_independent(self) -> None:
        values = np.array([uniform(11, position) for position in range(4000)])
        cells = np.histogram2d(values[:-1], values[1:], bins=6, range=[(0, 1), (0, 1)])[0].ravel()
        assert chi_square(cells, np.full(36, len(values[1:]) / 36)) < 1


def chi_square(counts, expected) -> float:
    """The statistic as a share of the value that chance exceeds once in a million (Wilson and Hilferty)."""
    common = expected >= 5
    pairs = [*zip(counts[common], expected[common], strict=True)]
    if (~common).any() and expected[~common].sum() >= 5:
        pairs.append((counts[~common].sum(), expected[~common].sum()))
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs)
    freedom = len(pairs) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    return statistic / limit


class TestRandomNumbers:
    def test_depend_on_seed_and_position_alone(self) -> None:
        values = {(seed, position): uniform(seed, position) for seed in range(8) for position in range(8)}
        assert len(set(values.values())) == 64
        assert all(0 <= value < 1 for value in values.values())
        assert values[3, 5] == uniform(3, 5)

    def test_negative_seeds_are_streams_of_their_own(self) -> None:
        assert uniform(-1, 0) != uniform(1, 0)


@pytest.mark.parametrize(("number", "expected"), [(0.0, 5), (1 - 2**-53, 9)])
def test_the_ends_of_the_range_never_draw_what_takes_no_part(monkeypatch, number, expected) -> None:
    monkeypatch.setattr("greenroom.serving.sampling.uniform", lambda seed, position: number)
    row = Row(SamplingParams(), 1, 0, [0], bits(range(5, 10)))
    assert sample(random_logits(1, 1), [row])[0].token == expected


class TestRowsThatCannotBeServed:
    GREEDY = SamplingParams(temperature=0)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_logits_that_are_not_finite(self, temperature, bad) -> None:
        logits = random_logits(2, 0)
        logits[0, 4] = bad
        rows = [Row(SamplingParams(temperature=temperature, logprobs=2), 1, 0, [0])] * 2
        first, second = sample(logits, rows)
        assert first.token is None
        assert second.token is not None

    def test_nothing_allowed(self) -> None:
        rows = [Row(self.GREEDY, 1, 0, [0], bits([])), Row(self.GREEDY, 1, 0, [0])]
        first, second = sample(random_logits(2, 0), rows)
        assert first.token is None
        assert second.token is not None

    def test_minus_infinity_is_never_drawn(self) -> None:
        logits = torch.full((1, VOCABULARY), -math.inf)
        logits[0, 7] = 1.0
        assert sample(logits, [Row(SamplingParams(), 1, 0, [0])])[0].token == 7
