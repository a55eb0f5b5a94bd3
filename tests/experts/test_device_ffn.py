"""The device's experts, one by one and by the library's grouped GEMM, against float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from greenroom.experts.activations import activate
from greenroom.experts.admission import count_pairs
from greenroom.experts.device_ffn import OneByOneFfn, can_group
from greenroom.experts.dispatch import Dispatch
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.grouped_ffn import GroupedFfn, run_all
from greenroom.experts.grouping import group_pairs
from greenroom.experts.tier import LayerBatch
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


OF_THE_LIBRARY = [fmt for fmt in VARIANTS if fmt.dtype == torch.bfloat16]
WAYS = [(fmt, False) for fmt in VARIANTS] + [(fmt, True) for fmt in OF_THE_LIBRARY]
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@given(
    way=st.sampled_from(WAYS),
    experts=st.integers(1, 9),
    group_size=st.integers(1, 4),
    tokens=st.integers(1, 9),
    top_k=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_groups_in_any_order_add_their_share(way, experts, group_size, tokens, top_k, seed):
    """Some experts do not run here, some lie in a group but are not wanted or lie twice, some places are empty."""
    variant, by_library = way
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

    blocks = random_blocks(variant, experts, generator)
    batch = random_batch(variant, ids, generator)
    table = torch.from_numpy(grouping.table).to(DEVICE)
    ffn = (GroupedFfn if by_library else OneByOneFfn)(batch, variant, experts, table)
    out = torch.ones(tokens, 16, device=DEVICE)
    for group, part in zip(groups, grouping.parts, strict=True):
        ffn.add(out, part, variant.views(blocks[torch.from_numpy(np.maximum(group, 0))].to(DEVICE)))

    here = np.zeros(experts, dtype=bool)
    here[np.concatenate([np.empty(0, dtype=np.int64), *wanted])] = True
    at = [i if 0 <= i < experts and here[i] else -1 for i in ids.flatten().tolist()]
    check(out, 1 + reference(batch, torch.tensor(at).view(ids.shape), blocks, variant), variant)


@given(
    variant=st.sampled_from(OF_THE_LIBRARY),
    experts=st.integers(1, 9),
    tokens=st.integers(1, 9),
    top_k=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_all_experts_at_once(variant, experts, tokens, top_k, seed):
    """Some choices belong to other ranks, so that fewer rows are computed than there are."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts + 2, (tokens, top_k), generator=generator).to(torch.int32)
    blocks = random_blocks(variant, experts, generator)
    batch = random_batch(variant, ids, generator)
    out = run_all(batch, variant, variant.views(blocks.to(DEVICE)))
    assert out.dtype == variant.dtype
    check(out, reference(batch, torch.where(ids < experts, ids, -1), blocks, variant), variant)


def random_blocks(fmt: ExpertFormat, experts: int, generator: torch.Generator) -> torch.Tensor:
    blocks = torch.zeros(experts, fmt.block_bytes, dtype=torch.uint8)
    for part in vars(fmt.views(blocks)).values():
        if part is not None:
            part.copy_(torch.randn(part.shape, generator=generator) * 0.5)
    return blocks


def random_batch(fmt: ExpertFormat, ids: torch.Tensor, generator: torch.Generator) -> LayerBatch:
    hidden = torch.randn(len(ids), fmt.hidden, generator=generator).to(fmt.dtype)
    weights = torch.rand(ids.shape, generator=generator)
    return LayerBatch(0, hidden.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))


def reference(batch: LayerBatch, ids: torch.Tensor, blocks: torch.Tensor, fmt: ExpertFormat) -> torch.Tensor:
    return moe_float64(batch.hidden.cpu(), ids, batch.weights.cpu(), fmt.views(blocks), fmt)


def check(out: torch.Tensor, expected: torch.Tensor, fmt: ExpertFormat) -> None:
    close = 1e-5 if fmt.dtype == torch.float32 else 2e-2
    assert (out.cpu().double() - expected).norm() <= close * expected.norm()


def test_the_library_gets_only_what_it_takes():
    gpu = torch.device("cuda")
    silu = Activation(ActivationKind.SILU)
    assert not can_group(ExpertFormat(64, 64, torch.float16, silu), 8, gpu)
    assert not can_group(ExpertFormat(64, 44, torch.bfloat16, silu), 8, gpu)
    assert not can_group(ExpertFormat(60, 64, torch.bfloat16, silu), 8, gpu)
    assert not can_group(ExpertFormat(64, 64, torch.bfloat16, silu), 1024, gpu)
    assert not can_group(ExpertFormat(64, 64, torch.bfloat16, silu), 8, torch.device("cpu"))


@pytest.mark.parametrize("kind", ActivationKind)
@pytest.mark.parametrize("limit", [float("inf"), 1.5])
def test_activations_follow_their_formulas(kind, limit):
    fmt = ExpertFormat(1, 40, torch.float32, Activation(kind, 1.3, limit))
    x = torch.randn(80, generator=torch.Generator().manual_seed(0)) * 4
    torch.testing.assert_close(activate(x, fmt).double(), activate_float64(x.double(), fmt), rtol=1e-5, atol=1e-5)
