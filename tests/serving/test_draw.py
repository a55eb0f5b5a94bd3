"""Draws from vocabularies larger than candidates and blocks, against one row at a time in float64 and whole."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.serving import draw as draws
from greenroom.serving import sampling
from greenroom.serving.requests import SamplingParams
from greenroom.serving.sampling import Row, sample, uniform
from tests.reference.slow_sampling import choose, probabilities
from tests.serving.test_sampling import bits

VOCABULARY = 203  # blocks of 16 do not divide it
CANDIDATES = 12
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 5e-324, 1e-9, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 1.0, 1 - 2**-53, 0.99, 0.7, 0.3, 1e-3, 5e-324]),
    top_k=st.sampled_from([0, 0, 1, 3, 6, 11, 12, 13, 25, 26, 202, 203, 100_000]),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    logprobs=st.sampled_from([None, None, 3]),
)


def shaped(shape: str, seed: int) -> torch.Tensor:
    """float32 [vocabulary]"""
    random = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return {
        "peaked": random * 5,
        "nearly flat": random * 1e-3,
        "flat": torch.ones(VOCABULARY),
        "two values": (random > 0.3).float(),
        "few values": random.round(),
        "few values, far apart": random.round() * 400,
        "many out of reach": random.where(random > 1.5, -math.inf),
        "one in reach": torch.full((VOCABULARY,), -math.inf).index_fill(0, random.argmax(), 1.0),
    }[shape]


SHAPES = ["peaked", "nearly flat", "flat", "two values", "few values", "few values, far apart", "many out of reach"]


@st.composite
def requests(draw):
    history = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4))
    allowed = draw(st.none() | st.none() | st.sets(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30))
    mask = None if allowed is None else bits(allowed, VOCABULARY)
    row = Row(draw(params), draw(st.integers(0, 2**64 - 1)), 1, history, mask)
    shape = draw(st.sampled_from([*SHAPES, "one in reach", "nan", "infinite"]))
    return row, allowed, shape, draw(st.integers(0, 1000))


def logits_of(shape: str, seed: int) -> torch.Tensor:
    if shape not in ("nan", "infinite"):
        return shaped(shape, seed)
    logits = shaped("peaked", seed)
    logits[seed % VOCABULARY] = math.nan if shape == "nan" else math.inf
    return logits


@pytest.fixture
def small(monkeypatch) -> None:
    monkeypatch.setattr(sampling, "_CANDIDATES", CANDIDATES)
    monkeypatch.setattr(draws, "_BLOCK", 16)


def expected(row: Row, allowed, logits: torch.Tensor) -> int | None:
    values = logits.tolist()
    hidden = allowed is not None and not any(math.isfinite(values[token]) for token in allowed)
    if any(math.isnan(value) for value in values) or hidden:
        return None
    if any(value == math.inf and (allowed is None or token in allowed) for token, value in enumerate(values)):
        return None
    return choose(probabilities(values, row.params, row.tokens, 1, allowed), uniform(row.seed, row.position))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("small")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(requests(), min_size=1, max_size=6), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_each_row_of_a_batch_is_what_it_is_alone_in_float64(device, batch, dtype) -> None:
    logits = torch.stack([logits_of(shape, seed) for _, _, shape, seed in batch]).to(dtype)
    rows = [row for row, *_ in batch]
    choices = sample(logits.to(device), rows)
    for index, (row, allowed, *_) in enumerate(batch):
        assert choices[index].token == expected(row, allowed, logits[index].float())
        assert sample(logits[index : index + 1].to(device), [row])[0].token == choices[index].token


@pytest.fixture
def passes(monkeypatch) -> list[tuple[int, int]]:
    """Rows and candidates of each pass over the logits; the host waits once in each."""
    seen, original = [], sampling._choose

    def counted(logits, rows, wishes, candidates):
        seen.append((len(rows), candidates))
        return original(logits, rows, wishes, candidates)

    monkeypatch.setattr(sampling, "_choose", counted)
    return seen


@pytest.mark.usefixtures("small")
class TestPasses:
    """Over a vocabulary, or over its candidates alone."""

    def run(self, *requests) -> None:
        logits = torch.stack([logits for logits, _ in requests])
        sample(logits, [Row(SamplingParams(**params), 3, 0, [0]) for _, params in requests])

    def test_candidates_that_decide_are_all_that_is_looked_at(self, passes) -> None:
        peaked = shaped("peaked", 1)
        self.run((peaked, {"top_p": 0.5}), (peaked, {"top_k": 3}), (peaked, {"min_p": 0.1}), (peaked, {}))
        self.run((peaked, {"top_k": 20}))
        # What comes at no temperature is not cut, and what is not cut needs no candidates.
        flat = shaped("flat", 1)
        self.run((flat, {"temperature": 0.0, "top_p": 0.9, "logprobs": 1}), (flat, {"top_k": VOCABULARY}))
        assert passes == [(4, CANDIDATES), (1, 40), (2, CANDIDATES)]

    @pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 3}, {"top_p": 0.001}])
    def test_only_rows_that_are_not_decided_are_done_again(self, passes, cut) -> None:
        self.run((shaped("peaked", 1), {"top_p": 0.5}), (shaped("flat", 1), cut), (shaped("flat", 1), {}))
        assert passes == [(3, CANDIDATES), (1, VOCABULARY)]

    def test_rows_without_a_choice_are_not_done_again(self, passes) -> None:
        self.run(
            (torch.full((VOCABULARY,), math.nan), {"top_p": 0.5}), (torch.full((VOCABULARY,), -math.inf), {"top_k": 2})
        )
        assert passes == [(2, CANDIDATES)]

    def test_out_of_reach_does_not_ask_for_more(self, passes) -> None:
        logits = torch.full((VOCABULARY,), -math.inf)
        logits[[7, 90, 200]] = 1.0
        self.run((logits, {"top_p": 0.999}), (logits, {"top_k": 6}))
        assert passes == [(2, CANDIDATES)]

    def test_a_top_k_near_the_vocabulary_orders_all_at_once(self, passes) -> None:
        self.run((shaped("flat", 1), {"top_k": 100}))
        assert passes == [(1, VOCABULARY)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("small")
def test_of_equals_at_the_edge_the_first_take_part(device) -> None:
    # Two stand out; of the others, more than there are candidates, top_k takes three by their ids.
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [150, 20]] = 0.1
    rows = [Row(SamplingParams(top_k=5), seed, 0, [0]) for seed in range(200)]
    drawn = {choice.token for choice in sample(logits.expand(200, -1).to(device), rows)}
    assert drawn == {150, 20, 0, 1, 2}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cut", [{}, {"top_k": 9}, {"top_p": 0.9999}, {"min_p": 1e-4}])
@pytest.mark.parametrize(("number", "token"), [(0.0, 70), (1 - 2**-53, 77)])
@pytest.mark.usefixtures("small")
def test_the_ends_of_the_range_are_the_first_and_last_that_take_part(monkeypatch, device, cut, number, token) -> None:
    monkeypatch.setattr(sampling, "uniform", lambda seed, position: number)
    logits = torch.full((1, VOCABULARY), -math.inf)
    logits[0, 70:78] = shaped("peaked", 2)[:8] * 0.1
    assert sample(logits.to(device), [Row(SamplingParams(**cut), 1, 0, [0])])[0].token == token


@pytest.mark.usefixtures("small")
def test_a_draw_covers_every_token_of_every_block_by_its_weight(monkeypatch) -> None:
    numbers = iter([(step + 0.5) / (8 * VOCABULARY) for step in range(8 * VOCABULARY)])
    monkeypatch.setattr(sampling, "uniform", lambda seed, position: next(numbers))
    rows = [Row(SamplingParams(), 1, 0, [0])] * (8 * VOCABULARY)
    choices = sample(torch.zeros(len(rows), VOCABULARY), rows)
    assert [choice.token for choice in choices] == [token for token in range(VOCABULARY) for _ in range(8)]


@pytest.mark.cuda
@pytest.mark.usefixtures("small")
def test_the_host_does_not_wait_for_a_draw() -> None:
    kinds = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.1), (1.0, 3, 0.9, 0.0), (1.0, 0, 0.5, 0.1)]
    wishes = [draws.Wish(0.5, *kind) for kind in kinds]
    scores = shaped("peaked", 1).expand(len(wishes), -1).cuda()
    best, likeliest = scores.max(-1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        draws.draw(scores, best, likeliest, wishes, CANDIDATES)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_draw_stays_in_its_block_where_sums_differ_in_their_last_bits(monkeypatch) -> None:
    monkeypatch.setattr(draws, "_BLOCK", 4)
    blocks = torch.tensor([[[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]], dtype=torch.float64)
    sums = torch.tensor([[2.0 + 2**-50, 1.0]], dtype=torch.float64)
    number = torch.tensor([[(2.0 + 2**-51) / (3.0 + 2**-50)]], dtype=torch.float64)
    assert draws._draw_from_blocks(blocks, sums, number).item() == 1
