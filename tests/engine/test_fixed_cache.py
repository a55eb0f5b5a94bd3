"""The KV cache of fixed size against a list of what it has been given."""

import pytest
import torch
from transformers import DynamicCache

pytest.importorskip("triton")

from greenroom.engine.fixed_cache import FixedCache
from tests.reference.families import make_model

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
CONFIG = make_model("mixtral").config
LAYERS = CONFIG.num_hidden_layers


def states(rows: int, tokens: int, dim: int, contiguous: bool, dtype: torch.dtype) -> torch.Tensor:
    """[rows, 3 heads, tokens, dim]: as a kernel leaves them, or a part of a larger product."""
    wide = torch.randn(rows, tokens, 3, dim + 5, device=DEVICE).to(dtype)[..., :dim].transpose(1, 2)
    return wide.contiguous() if contiguous else wide


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize(("rows", "dims"), [(1, (16, 16)), (3, (24, 10))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keeps_what_it_is_given(rows, dims, contiguous, dtype):
    tokens = torch.zeros(1, dtype=torch.long, device=DEVICE)
    cache = FixedCache(CONFIG, 4, 12, tokens)
    for length in (5, 3):  # two prompts, one after the other
        seen = [[states(rows, length, dim, True, dtype) for dim in dims] for _ in range(LAYERS)]
        prompt = DynamicCache(config=CONFIG)
        for layer, (keys, values) in enumerate(seen):
            prompt.update(keys, values, layer)
        cache.take_over(prompt, length)
        tokens.fill_(length)
        for token in range(4):
            assert cache.get_seq_length() == length + token
            for layer, both in enumerate(seen):
                new = [states(4, 1, dim, contiguous, dtype) for dim in dims]
                found = cache.update(*new, layer)
                both[:] = [torch.cat([old, one[:rows]], 2) for old, one in zip(both, new, strict=True)]
                for kept, expected in zip(found, both, strict=True):
                    assert kept.shape[:3] == (4, 3, 12)
                    assert torch.equal(kept[:rows, :, : length + token + 1], expected)
            tokens.add_(1)


def two_tokens() -> FixedCache:
    """Of one row, all zeros."""
    cache = FixedCache(CONFIG, 1, 8, torch.full((1,), 2, device=DEVICE))
    prompt = DynamicCache(config=CONFIG)
    for layer in range(LAYERS):
        prompt.update(torch.zeros(1, 3, 2, 8, device=DEVICE), torch.zeros(1, 3, 2, 8, device=DEVICE), layer)
    cache.take_over(prompt, 2)
    return cache


def test_columns_that_do_not_follow_each_other():
    cache = two_tokens()
    key, value = torch.randn(2, 1, 3, 8, 1, device=DEVICE).transpose(-1, -2)
    keys, values = cache.update(key, value, 0)
    assert torch.equal(keys[:, :, 2:3], key)
    assert torch.equal(values[:, :, 2:3], value)


def test_takes_a_token_at_a_time():
    with pytest.raises(ValueError, match="a token at a time, not 2"):
        two_tokens().update(torch.zeros(1, 3, 2, 8, device=DEVICE), torch.zeros(1, 3, 2, 8, device=DEVICE), 0)
