"""Attention over packed sequences against the same sum in float64, token by token."""

import pytest
import torch

from greenroom.engine.paged.attention import attend_each, attend_singles, attend_span
from greenroom.engine.paged.packing import Span

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
HEADS = [(4, 4), (8, 2)]
WIDTHS = [(24, 12), (128, 128)]
SPECIAL = [(None, False), (5, False), (None, True), (130, True)]


def token_by_token(query, key, value, ends, firsts, scale, window, sinks):
    """query: [1, Hq, T, D]; token t sees keys [firsts[t], ends[t]) of [1, Hk, S, D]. Float64 [T, Hq, Dv]."""
    group = query.shape[1] // key.shape[1]
    wide_key, wide_value = (t[0].double().repeat_interleave(group, 0) for t in (key, value))
    out = []
    for token, (first, end) in enumerate(zip(firsts, ends, strict=True)):
        first = first if window is None else max(first, end - window)
        products = torch.einsum("hd,hsd->hs", query[0, :, token].double(), wide_key[:, first:end]) * scale
        if sinks is not None:
            products = torch.cat([products, sinks.double()[:, None]], 1)
        weights = products.softmax(-1)[:, : end - first]
        out.append(torch.einsum("hs,hsd->hd", weights, wide_value[:, first:end]))
    return torch.stack(out)


def drawn(heads, key_heads, tokens, keys, dim, value_dim, device, sink, dtype):
    torch.manual_seed(tokens + keys)
    shapes = ((heads, tokens, dim), (key_heads, keys, dim), (key_heads, keys, value_dim))
    tensors = [torch.randn(1, *shape, device=device).to(dtype) for shape in shapes]
    return *tensors, torch.randn(heads, device=device).to(dtype) * 2 if sink else None


def is_close(result, expected, dtype):
    error = (result.double() - expected).norm() / expected.norm()
    return error < (1e-5 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("heads", "key_heads"), HEADS)
@pytest.mark.parametrize(("dim", "value_dim"), WIDTHS)
@pytest.mark.parametrize(("window", "sink"), SPECIAL)
@pytest.mark.parametrize(("tokens", "own"), [(9, 9), (4, 40), (133, 140)])
def test_a_chunk_of_a_sequence(dtype, device, heads, key_heads, dim, value_dim, window, sink, tokens, own):
    before, behind = 3, 6  # keys of other sequences
    query, key, value, sinks = drawn(
        heads, key_heads, tokens, before + own + behind, dim, value_dim, device, sink, dtype
    )
    span = Span(0, tokens, before, own)
    result = attend_span(query, key, value, span, 0.3, window, sinks)
    ends = [before + own - tokens + token + 1 for token in range(tokens)]
    expected = token_by_token(query, key, value, ends, [before] * tokens, 0.3, window, sinks)
    assert is_close(result[0].transpose(0, 1), expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("heads", "key_heads"), HEADS)
@pytest.mark.parametrize(("dim", "value_dim"), WIDTHS)
@pytest.mark.parametrize(("window", "sink"), SPECIAL)
def test_single_tokens_of_several_sequences(dtype, device, heads, key_heads, dim, value_dim, window, sink):
    lengths = [1, 17, 140, 4]
    starts = [0, 1, 18, 158]
    query, key, value, sinks = drawn(heads, key_heads, 4, 162, dim, value_dim, device, sink, dtype)
    places = torch.tensor(
        [[start + min(i, n - 1) for i in range(140)] for start, n in zip(starts, lengths, strict=True)]
    )
    result = attend_singles(
        query, key, value, places.to(device), torch.tensor(lengths, device=device), 0.3, window, sinks
    )
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    expected = token_by_token(query, key, value, ends, starts, 0.3, window, sinks)
    assert is_close(result[0], expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "key_heads"), HEADS)
@pytest.mark.parametrize(("dim", "value_dim"), WIDTHS)
@pytest.mark.parametrize(("window", "sink"), SPECIAL)
def test_single_tokens_one_sequence_after_another(dtype, heads, key_heads, dim, value_dim, window, sink):
    lengths, starts = [1, 17, 140, 4], [0, 1, 18, 158]
    query, key, value, sinks = drawn(heads, key_heads, 4, 162, dim, value_dim, "cpu", sink, dtype)
    result = attend_each(query, key, value, lengths, 0.3, window, sinks)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    expected = token_by_token(query, key, value, ends, starts, 0.3, window, sinks)
    assert result.shape == (1, 4, heads, value_dim)
    assert is_close(result[0], expected, dtype)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        own = slice(start, end)
        alone = attend_each(
            query[:, :, row : row + 1], key[:, :, own], value[:, :, own], [end - start], 0.3, window, sinks
        )
        assert torch.equal(alone[0, 0], result[0, row]), "a sequence's bits depend on the others"
