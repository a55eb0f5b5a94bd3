"""The device's expert arithmetic, in plain torch and so testable anywhere, against float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from greenroom.experts.activations import activate
from greenroom.experts.admission import count_pairs
from greenroom.experts.device_ffn import add_group, can_group, sort_pairs
from greenroom.experts.dispatch import Dispatch
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.grouping import group_pairs
from tests.reference.expert_math import activate_float64, moe_float64

VARIANTS = [
    ExpertFormat(16, 24, torch.float32, Activation(ActivationKind.SILU)),
    ExpertFormat(16, 12, torch.float32, Activation(ActivationKind.SWIGLU_OAI, 1.702, 7.0), bias=True),
    ExpertFormat(16, 12, torch.float32, Activation(ActivationKind.RELU2), gated=False, bias=True),
    ExpertFormat(16, 12, torch.float32, Activation(ActivationKind.GELU)),
    ExpertFormat(16, 12, torch.float32, Activation(ActivationKind.GELU_TANH, limit=0.5)),
    ExpertFormat(16, 24, torch.bfloat16, Activation(ActivationKind.SILU)),
    ExpertFormat(16, 24, torch.bfloat16, Activation(ActivationKind.SWIGLU_OAI, 1.702, 7.0), bias=True),
    ExpertFormat(16, 24, torch.bfloat16, Activation(ActivationKind.RELU2), gated=False, bias=True),
]


@given(
    variant=st.sampled_from(VARIANTS),
    experts=st.integers(1, 9),
    group_size=st.integers(1, 4),
    tokens=st.integers(1, 9),
    top_k=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_groups_in_any_order_add_their_share(variant, experts, group_size, tokens, top_k, seed):
    """Some experts do not run here, some lie in a group but are not wanted or lie twice, some places are empty."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(experts, generator=generator).numpy()
    lying = order[: int(torch.randint(0, experts + 1, (1,), generator=generator))]
    runs = torch.rand(experts, generator=generator).numpy() < 0.8
    ids = torch.randint(-1, experts + 2, (tokens, top_k), generator=generator).to(torch.int32)
    counts = count_pairs(ids.numpy(), experts)
    groups = [lying[start : start + group_size] for start in range(0, len(lying), group_size)]
    wanted = tuple(group[runs[group] & (counts[group] > 0)] for group in groups)
    groups = [np.insert(group, 0, -1) for group in groups] + groups[:1]
    plan = Dispatch(counts, np.empty(0, dtype=np.int64), wanted, np.empty(0, dtype=np.int64))
    grouping = group_pairs(groups, plan)

    blocks = torch.zeros(experts, variant.block_bytes, dtype=torch.uint8)
    for part in vars(variant.views(blocks)).values():
        if part is not None:
            part.copy_(torch.randn(part.shape, generator=generator) * 0.5)
    hidden = torch.randn(tokens, 16, generator=generator).to(variant.dtype)
    weights = torch.rand(tokens, top_k, generator=generator)
    table = torch.from_numpy(grouping.table)
    place, ends = table[:experts], table[experts:]
    pairs = sort_pairs(ids, weights, place)
    out = torch.ones(tokens, 16)
    for group, part in zip(groups, grouping.parts, strict=True):
        views = variant.views(blocks[torch.from_numpy(np.maximum(group, 0))])
        group_ends = ends[part.first_place : part.first_place + len(group)]
        by_library = variant.dtype == torch.bfloat16
        add_group(out, hidden, pairs, part.first_pair, part.pairs_at, group_ends, views, variant, by_library)

    here = np.zeros(experts, dtype=bool)
    here[np.concatenate([np.empty(0, dtype=np.int64), *wanted])] = True
    at = [i if 0 <= i < experts and here[i] else -1 for i in ids.flatten().tolist()]
    expected = 1 + moe_float64(hidden, torch.tensor(at).view(ids.shape), weights, variant.views(blocks), variant)
    close = 1e-5 if variant.dtype == torch.float32 else 2e-2
    assert (out - expected).norm() <= close * expected.norm()


def test_the_library_gets_only_what_it_takes():
    gpu = torch.device("cuda")
    silu = Activation(ActivationKind.SILU)
    assert not can_group(ExpertFormat(64, 64, torch.float16, silu), gpu)
    assert not can_group(ExpertFormat(64, 44, torch.bfloat16, silu), gpu)
    assert not can_group(ExpertFormat(60, 64, torch.bfloat16, silu), gpu)
    assert not can_group(ExpertFormat(64, 64, torch.bfloat16, silu), torch.device("cpu"))


@pytest.mark.parametrize("kind", ActivationKind)
@pytest.mark.parametrize("limit", [float("inf"), 1.5])
def test_activations_follow_their_formulas(kind, limit):
    fmt = ExpertFormat(1, 40, torch.float32, Activation(kind, 1.3, limit))
    x = torch.randn(80, generator=torch.Generator().manual_seed(0)) * 4
    torch.testing.assert_close(activate(x, fmt).double(), activate_float64(x.double(), fmt), rtol=1e-5, atol=1e-5)
