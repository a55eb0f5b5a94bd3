"""Fused parts of a model against transformers' own code and float64."""

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

pytest.importorskip("triton")

from greenroom.engine.fused_rope import fuse_rope
from greenroom.engine.fused_router import fuse_routers
from greenroom.engine.fusion import ATTENTION, attention_forward, fuse_norms, use_decode_attention
from greenroom.kernels.gpu.decode_attention import decode_attention
from tests.reference.families import FAMILIES, make_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("width", [1, 7, 64, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_fused_norm_equals_the_models(width, dtype):
    stock, fused = (Qwen3MoeRMSNorm(width).to(DEVICE, dtype) for _ in range(2))
    nn.init.normal_(stock.weight)
    fused.load_state_dict(stock.state_dict())
    assert fuse_norms(fused) == 1
    rows = (torch.randn(3, 5, width, device=DEVICE) * 10).to(dtype)
    with torch.no_grad():
        expected, result = stock(rows), fused(rows)
    assert result.dtype == expected.dtype
    # The mean is summed in another order, which may turn one rounding over.
    torch.testing.assert_close(result, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_that_is_kept_wider_than_the_model_stays_the_models_own(dtype):
    """transformers keeps gpt_oss's norms in float32 in a float16 model."""
    stock, fused = (GptOssRMSNorm(32).to(DEVICE) for _ in range(2))
    nn.init.normal_(stock.weight)
    fused.load_state_dict(stock.state_dict())
    fuse_norms(fused)
    rows = torch.randn(3, 5, 32, device=DEVICE).to(dtype)
    with torch.no_grad():
        expected, result = stock(rows), fused(rows)
    assert result.dtype == expected.dtype == dtype
    assert torch.equal(result, expected)


@pytest.mark.parametrize("module", [Gemma3RMSNorm(32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Embedding(32, 8)])
def test_other_modules_are_left_alone(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    assert fuse_norms(module.to(DEVICE)) == 0


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (8, 2), (32, 4), (6, 1)])
@pytest.mark.parametrize(("length", "dim", "value_dim"), [(5, 16, 16), (177, 128, 128), (64, 40, 24), (2500, 32, 32)])
def test_decode_attention_equals_float64(heads, key_heads, length, dim, value_dim):
    batch, dtype = 2, torch.bfloat16
    query = torch.randn(batch, heads, 1, dim, device=DEVICE).to(dtype)
    key = torch.randn(batch, key_heads, length, dim, device=DEVICE).to(dtype)
    value = torch.randn(batch, key_heads, length, value_dim, device=DEVICE).to(dtype)
    mask = torch.zeros(batch, 1, 1, length, dtype=torch.bool, device=DEVICE)
    mask[0, ..., : max(1, length // 2)] = True
    mask[1, ..., length - 1] = True  # all but the last stretch see nothing
    out = decode_attention(query, key, value, mask, 0.3)
    wide = [tensor.double().repeat_interleave(heads // key_heads, 1) for tensor in (key, value)]
    products = (query.double() @ wide[0].transpose(2, 3)) * 0.3
    expected = products.masked_fill(~mask, float("-inf")).softmax(-1) @ wide[1]
    error = (out.double() - expected.transpose(1, 2)).norm() / expected.norm()
    assert error < 5e-3


class Attention(nn.Module):
    num_key_value_groups = 4
    is_causal = True


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("masked", [True, False])
def test_the_attention_function_equals_sdpa(tokens, masked):
    query = torch.randn(2, 3, 8, 16, device=DEVICE)[:, :tokens].transpose(1, 2)
    key, value = torch.randn(2, 2, 2, 20, 16, device=DEVICE)
    mask = torch.rand(2, 1, tokens, 20, device=DEVICE) > 0.5 if masked else None
    if mask is not None:
        mask[..., 0] = True
    result, _ = attention_forward(Attention(), query, key, value, mask, scaling=0.2)
    expected, _ = sdpa_attention_forward(Attention(), query, key, value, mask, scaling=0.2)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_fused_model_generates_what_the_stock_model_does(family):
    stock, fused = (make_model(family).to(DEVICE) for _ in range(2))
    used_sdpa = stock.config._attn_implementation == "sdpa"
    fuse_norms(fused)
    fuse_rope(fused)
    fuse_routers(fused)
    assert use_decode_attention(fused) == used_sdpa
    assert use_decode_attention(fused) == used_sdpa, "asking twice changes nothing"
    assert (fused.config._attn_implementation == ATTENTION) == used_sdpa
    ids = torch.randint(3, 100, (2, 9), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = stock.generate(ids, attention_mask=mask, **options)
    result = fused.generate(ids, attention_mask=mask, **options)
    assert result.sequences.tolist() == expected.sequences.tolist()
    for mine, theirs in zip(result.logits, expected.logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
