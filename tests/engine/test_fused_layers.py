"""Rotary embedding and routers in one kernel against transformers' own code."""

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

pytest.importorskip("triton")

from greenroom.engine.fused_rope import fuse_rope
from greenroom.engine.fused_router import fuse_routers
from greenroom.kernels.gpu.rope import rotate
from greenroom.kernels.gpu.route import route
from tests.reference.families import FAMILIES, make_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads", "tokens", "dim"), [(4, 2, 1, 128), (3, 1, 5, 12), (1, 1, 2, 2)])
def test_rotation_equals_the_models_bit_for_bit(heads, key_heads, tokens, dim, dtype):
    query = torch.randn(2, tokens, heads, dim, device=DEVICE).to(dtype).transpose(1, 2)
    key = torch.randn(2, tokens, key_heads, dim, device=DEVICE).to(dtype).transpose(1, 2)
    cos, sin = torch.randn(2, 2, tokens, dim, device=DEVICE).to(dtype).unbind()
    for tables in ((cos, sin), (cos[:1], sin[:1])):
        expected = qwen3_moe.apply_rotary_pos_emb(query, key, *tables)
        for result, wanted in zip(rotate(query, key, *tables), expected, strict=True):
            # The interpreter rounds bfloat16 towards zero.
            tolerance = 0.0 if DEVICE == "cuda" or dtype != torch.bfloat16 else 6 * torch.finfo(dtype).eps
            torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (60, 4), (8, 2), (3, 3), (1, 1)])
@pytest.mark.parametrize("normalise", [True, False])
def test_the_choice_equals_float64(experts, top_k, normalise, dtype):
    logits = (torch.randn(7, experts, device=DEVICE) * 3).to(dtype)
    ids, weights = route(logits, top_k, normalise=normalise, dtype=torch.float32)
    shares = logits.double().softmax(-1)
    expected = shares.topk(top_k).values
    torch.testing.assert_close(shares.gather(1, ids), expected, rtol=1e-12, atol=0)
    assert all(len(set(row)) == top_k for row in ids.tolist())
    if normalise:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("family", "router"),
    [
        ("qwen3_moe", qwen3_moe.Qwen3MoeTopKRouter),
        ("qwen2_moe", qwen2_moe.Qwen2MoeTopKRouter),
        ("mixtral", mixtral.MixtralTopKRouter),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fused_router_returns_what_the_models_does(family, router, dtype):
    stock, fused = (router(FAMILIES[family]()).to(DEVICE, dtype) for _ in range(2))
    nn.init.normal_(stock.weight, std=0.1)
    fused.load_state_dict(stock.state_dict())
    assert fuse_routers(fused) == 1
    rows = torch.randn(2, 9, stock.weight.shape[1], device=DEVICE).to(dtype)
    with torch.no_grad():
        (logits, weights, ids), (own_logits, own_weights, own_ids) = fused(rows), stock(rows)
    assert torch.equal(logits, own_logits)
    assert weights.dtype == own_weights.dtype
    limits = torch.finfo(weights.dtype)
    torch.testing.assert_close(weights, own_weights, rtol=4 * limits.eps, atol=limits.smallest_normal)
    # Experts with equal logits may stand for one another.
    assert torch.equal(logits.gather(1, ids), logits.gather(1, own_ids))


def test_other_routers_are_left_alone():
    router = DeepseekV3TopkRouter(FAMILIES["deepseek_v3"]())
    nn.init.normal_(router.weight)
    assert fuse_routers(nn.ModuleList([router, nn.Linear(8, 4), nn.Embedding(8, 4)]).to(DEVICE)) == 0


@pytest.mark.parametrize(
    ("family", "fuses"),
    [("qwen3_moe", True), ("mixtral", True), ("deepseek_v3", True), ("glm4_moe", True), ("deepseek_v2", False)],
)
def test_only_the_usual_rotation_is_replaced_and_only_in_this_model(family, fuses):
    """glm turns part of a head, which the fused function leaves to its own; deepseek_v2 turns complex numbers."""
    model, other = make_model(family).to(DEVICE), make_model(family).to(DEVICE)
    layers = model.config.num_hidden_layers
    assert fuse_rope(model) == (layers if fuses else 0)
    assert all("forward" not in vars(module) for module in other.modules())
    ids = torch.arange(4, 24, device=DEVICE).view(2, 10)
    with torch.no_grad():
        expected, result = other(input_ids=ids).logits, model(input_ids=ids).logits
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
