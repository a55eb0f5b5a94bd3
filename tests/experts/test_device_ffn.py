"""The device's expert arithmetic, in plain torch and so testable anywhere, against float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from greenroom.experts.activations import activate
from greenroom.experts.admission import count_pairs
from greenroom.experts.device_ffn import add_experts
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from tests.reference.expert_math import activate_float64, moe_float64

VARIANTS = [
    ExpertFormat(16, 12, torch.float32, Activation(ActivationKind.SILU)),
    ExpertFormat(16, 12, torch.float32, Activation(ActivationKind.SWIGLU_OAI, 1.702, 7.0), bias=True),
    ExpertFormat(16, 12, torch.float32, Activation(ActivationKind.RELU2), gated=False, bias=True),
    ExpertFormat(16, 12, torch.float32, Activation(ActivationKind.GELU)),
    ExpertFormat(16, 12, torch.float32, Activation(ActivationKind.GELU_TANH, limit=0.5)),
]


@given(
    variant=st.sampled_from(VARIANTS),
    experts=st.integers(1, 6),
    tokens=st.integers(1, 9),
    top_k=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_experts_in_any_position_add_their_share(variant, experts, tokens, top_k, seed):
    generator = torch.Generator().manual_seed(seed)
    here = torch.rand(experts, generator=generator) < 0.7
    order = torch.randperm(experts, generator=generator)
    chosen = [int(e) for e in order if here[e]]
    blocks = torch.zeros(max(len(chosen), 1), variant.block_bytes, dtype=torch.uint8)
    views = variant.views(blocks)
    for part in vars(views).values():
        if part is not None:
            part.copy_(torch.randn(part.shape, generator=generator))
    position = torch.full((experts,), -1, dtype=torch.int32)
    for place, expert in enumerate(chosen):
        position[expert] = place
    hidden = torch.randn(tokens, 16, generator=generator)
    ids = torch.randint(-1, experts + 2, (tokens, top_k), generator=generator).to(torch.int32)
    weights = torch.rand(tokens, top_k, generator=generator)
    counts = count_pairs(ids.numpy(), experts)
    pairs_at = np.array([counts[expert] for expert in chosen], dtype=np.int64)
    out = torch.ones(tokens, 16)
    add_experts(out, hidden, ids, weights, position, pairs_at, views, variant)
    at = torch.tensor([int(position[i]) if 0 <= i < experts else -1 for i in ids.flatten().tolist()]).view(ids.shape)
    expected = 1 + moe_float64(hidden, at, weights, views, variant)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ActivationKind)
@pytest.mark.parametrize("limit", [float("inf"), 1.5])
def test_activations_follow_their_formulas(kind, limit):
    fmt = ExpertFormat(1, 40, torch.float32, Activation(kind, 1.3, limit))
    x = torch.randn(80, generator=torch.Generator().manual_seed(0)) * 4
    torch.testing.assert_close(activate(x, fmt).double(), activate_float64(x.double(), fmt), rtol=1e-5, atol=1e-5)
