"""Pairs sorted by the place of their expert, against Python's own sort."""

import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st

from greenroom.kernels.gpu.expert_sort import sort_by_expert

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def check(ids: torch.Tensor, place_of: torch.Tensor | None, experts: int, num_places: int) -> None:
    on_device = place_of if place_of is None else place_of.to(DEVICE)
    found = sort_by_expert(ids.to(DEVICE), on_device, experts, num_places)
    places = list(range(experts)) if place_of is None else place_of.tolist()
    at = [places[expert] if 0 <= expert < experts else -1 for expert in ids.flatten().tolist()]
    order = sorted((pair for pair, place in enumerate(at) if place >= 0), key=lambda pair: at[pair])  # stable
    top_k = ids.shape[1]
    assert found.tokens.tolist() == [pair // top_k for pair in order] + [0] * (len(at) - len(order))
    assert found.places.tolist() == [at[pair] for pair in order] + [0] * (len(at) - len(order))
    positions = [-1] * len(at)
    for position, pair in enumerate(order):
        positions[pair] = position
    assert found.positions.flatten().tolist() == positions
    assert found.ends.tolist() == [sum(0 <= p <= place for p in at) for place in range(num_places)]


@given(
    tokens=st.integers(1, 40),
    top_k=st.integers(1, 9),
    experts=st.integers(1, 70),
    mapped=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_routing(tokens, top_k, experts, mapped, seed):
    """Ids of other ranks, experts that do not run here, and two that share a place."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, experts + 2, (tokens, top_k), generator=generator)
    ids = ids.to(torch.int32) if seed % 2 else ids
    place_of = torch.randint(-1, experts, (experts,), generator=generator).to(torch.int32) if mapped else None
    check(ids, place_of, experts, experts)


@pytest.mark.parametrize(("tokens", "experts"), [(700, 128), (270, 1000), (33, 2000)])
def test_many_chunks_and_many_places(tokens, experts):
    ids = torch.randint(0, experts, (tokens, 8), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    check(ids, None, experts, experts)


def test_nobody_runs_here():
    ids = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)
    check(ids, torch.full((3,), -1, dtype=torch.int32), 3, 1)
