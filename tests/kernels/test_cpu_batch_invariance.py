"""A batch-invariant engine gives each token the same bits, whoever else is in its job."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.experts.formats import ExpertFormat
from greenroom.experts.native import Isa, supported_isas
from tests.kernels.batches import SILU, Batch, Engines
from tests.kernels.test_cpu_engine import formats

ISAS = supported_isas()


def same_alone(batch: Batch, engines: Engines, isa: Isa, parts: tuple[int, ...]) -> None:
    """In parts of so many tokens, every token's output is that in the whole batch, which is right."""
    engine = engines.get(2, isa, batch_invariant=True)
    whole = batch.run(engine)
    batch.check(whole, isa)
    for size in parts:
        for first in range(0, len(whole), size):
            tokens = slice(first, first + size)
            assert torch.equal(batch.only(tokens).run(engine), whole[tokens]), f"{isa.label}: {size} from {first}"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    format=formats(),
    experts=st.integers(1, 6),
    topk=st.integers(1, 4),
    tokens=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_random_batches(
    engines: Engines, format: ExpertFormat, experts: int, topk: int, tokens: int, seed: int
) -> None:
    batch = Batch(format, experts, topk, tokens, seed)
    for isa in ISAS:
        same_alone(batch, engines, isa, (1, 3))


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.label)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("divided", [None, (1, 64)])
def test_long_rows_and_many_tokens(engines: Engines, isa: Isa, dtype: torch.dtype, divided: tuple[int, int]) -> None:
    """Rows of many steps, whose order of adding shows; more tokens an expert than one pass takes."""
    batch = Batch(ExpertFormat(1000, 520, dtype, SILU), 2, 2, 80, seed=5)
    batch.divided = divided
    same_alone(batch, engines, isa, (1, 2, 5, 17, 64))


def test_other_engines_may_add_in_another_order(engines: Engines) -> None:
    """So the tests above can fail."""
    batch = Batch(ExpertFormat(1000, 520, torch.bfloat16, SILU), 2, 2, 80, seed=5)
    engine = engines.get(2, Isa.AUTO)
    assert not torch.equal(batch.only(slice(0, 1)).run(engine), batch.run(engine)[:1])
