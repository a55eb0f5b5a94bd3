"""Attention over blocks against the same sum in float64."""

import pytest
import torch

pytest.importorskip("triton")

from greenroom.kernels.gpu.paged_attention import paged_decode_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE = 16


def reference(query, keys, values, lengths, scale, window, sinks):
    """Row by row, keys and values as lists of whole sequences [length, Hk, dim]."""
    out = []
    for row, (key, value, length) in enumerate(zip(keys, values, lengths, strict=True)):
        first = 0 if window is None else max(0, length - window)
        group = query.shape[1] // key.shape[1]
        key, value = (t[first:length].double().repeat_interleave(group, 1) for t in (key, value))
        products = torch.einsum("hd,shd->hs", query[0, :, row].double(), key) * scale
        if sinks is not None:
            products = torch.cat([products, sinks.double()[:, None]], 1)
        weights = products.softmax(-1)[:, : length - first]
        out.append(torch.einsum("hs,shd->hd", weights, value))
    return torch.stack(out)[None]


def scattered(tensors, num_blocks, order):
    """Writes sequences into blocks handed out in ``order``; every other place holds what must not be read.

    Returns [blocks * BLOCK_SIZE, Hk, dim] and the sequences' blocks.
    """
    pool = torch.full((num_blocks, BLOCK_SIZE, *tensors[0].shape[1:]), 1e4, dtype=tensors[0].dtype, device=DEVICE)
    order, tables = list(order), []
    for tensor in tensors:
        blocks = [order.pop() for _ in range(-(-len(tensor) // BLOCK_SIZE))]
        for index, block in enumerate(blocks):
            part = tensor[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            pool[block, : len(part)] = part
        tables.append(blocks)
    return pool.flatten(0, 1), tables


@pytest.mark.parametrize(("heads", "key_heads"), [(8, 2), (6, 1)])
@pytest.mark.parametrize(("dim", "value_dim"), [(40, 24), (128, 128)])
@pytest.mark.parametrize(("window", "sink"), [(None, False), (37, False), (None, True), (16, True)])
@pytest.mark.parametrize("lengths", [(1, 129, 16, 17), (600,)])
def test_equals_float64(heads, key_heads, dim, value_dim, window, sink, lengths):
    torch.manual_seed(0)
    dtype, scale = torch.bfloat16, 0.3
    query = torch.randn(1, len(lengths), heads, dim, device=DEVICE).to(dtype).transpose(1, 2)
    keys = [torch.randn(length, key_heads, dim, device=DEVICE).to(dtype) for length in lengths]
    values = [torch.randn(length, key_heads, value_dim, device=DEVICE).to(dtype) for length in lengths]
    sinks = torch.randn(heads, device=DEVICE) * 2 if sink else None
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in lengths) + 3
    order = torch.randperm(num_blocks).tolist()
    key, blocks = scattered(keys, num_blocks, order)
    value, _ = scattered(values, num_blocks, order)
    # Wider than any sequence needs; what lies beyond a sequence's blocks must not matter.
    tables = torch.full((len(lengths), 70), -(2**40), dtype=torch.int64, device=DEVICE)
    for row, own in zip(tables, blocks, strict=True):
        row[: len(own)] = torch.tensor(own)
    if window is None:
        tables = tables.T.contiguous().T  # block after block, as decode graphs have them
    out = paged_decode_attention(
        query, key, value, tables, torch.tensor(lengths, device=DEVICE), BLOCK_SIZE, scale, window, sinks
    )
    expected = reference(query, keys, values, lengths, scale, window, sinks)
    assert out.shape == expected.shape
    assert (out.double() - expected).norm() / expected.norm() < 5e-3
