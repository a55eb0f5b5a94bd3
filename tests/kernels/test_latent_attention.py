"""Latent attention over blocks against keys and values expanded in float64."""

import pytest
import torch

pytest.importorskip("triton")

from greenroom.kernels.gpu.latent_attention import latent_decode_attention
from tests.kernels.test_paged_attention import BLOCK_SIZE, DEVICE, reference, scattered


@pytest.mark.parametrize("heads", [4, 20, 32])
@pytest.mark.parametrize(("rank", "dim"), [(24, 8), (512, 64)])
@pytest.mark.parametrize("lengths", [(1, 129, 16, 17), (600,)])
def test_equals_expanded_attention_in_float64(heads, rank, dim, lengths):
    torch.manual_seed(0)
    dtype, nope, value_dim, scale = torch.bfloat16, 12, 10, 0.1
    to_key = torch.randn(heads, nope, rank, device=DEVICE).double() / rank**0.5
    to_value = torch.randn(heads, value_dim, rank, device=DEVICE).double()
    plain = torch.randn(heads, len(lengths), nope, device=DEVICE).double()
    query = (plain @ to_key).to(dtype)
    rotated_query = torch.randn(len(lengths), heads, dim, device=DEVICE).to(dtype).transpose(0, 1)
    latents = [torch.randn(length, 1, rank, device=DEVICE).to(dtype) for length in lengths]
    rotated = [torch.randn(length, 1, dim, device=DEVICE).to(dtype) for length in lengths]
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in lengths) + 3
    order = torch.randperm(num_blocks).tolist()
    latent_blocks, blocks = scattered(latents, num_blocks, order)
    rotated_blocks, _ = scattered(rotated, num_blocks, order)
    tables = torch.full((len(lengths), 70), -(2**40), dtype=torch.int64, device=DEVICE)
    for row, own in zip(tables, blocks, strict=True):
        row[: len(own)] = torch.tensor(own)
    out = latent_decode_attention(
        query,
        rotated_query,
        latent_blocks,
        rotated_blocks,
        tables,
        torch.tensor(lengths, device=DEVICE),
        BLOCK_SIZE,
        scale,
    )
    keys = [
        torch.cat([torch.einsum("sr,hpr->shp", c[:, 0].double(), to_key), r.double().expand(-1, heads, -1)], -1)
        for c, r in zip(latents, rotated, strict=True)
    ]
    values = [torch.einsum("sr,hvr->shv", c[:, 0].double(), to_value) for c in latents]
    whole = torch.cat([plain, rotated_query.double()], -1)[None]
    expected = reference(whole, keys, values, lengths, scale, None, None)[0]
    result = torch.einsum("nhr,hvr->nhv", out.double(), to_value)
    assert (result - expected).norm() / expected.norm() < 1e-2
