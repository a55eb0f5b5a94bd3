"""What is found out without weights equals what a real run keeps and needs."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PretrainedConfig

from greenroom.bench.shapes import shape_config
from greenroom.engine.cache_argument import cache_argument
from greenroom.engine.model_shape import KvLayer, probe_shape
from greenroom.errors import UnsupportedModelError
from tests.reference.families import FAMILIES, HIDDEN, VOCAB, make_model

TOP_K = {"qwen2_moe": 4, "qwen3_moe": 4, "mixtral": 2, "deepseek_v2": 3, "gpt_oss": 2, "ernie4_5_moe": 3, "gemma4": 3}


def held_bytes(value: Any) -> int:
    """Of all tensors that a cache holds, but for scalars."""
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.ndim > 1 else 0
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(held_bytes(item) for item in items)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_kv_bytes_are_those_of_a_real_cache(family):
    """Below and beyond the sliding window, which is 16 where there is one."""
    stock = make_model(family, torch.bfloat16)
    shape = probe_shape(stock.config, torch.bfloat16)
    for tokens in (1, 9, 40):
        cache = DynamicCache(config=stock.config)
        ids = torch.ones(1, tokens, dtype=torch.long)
        # One token at a time: a prefill may leave more in a sliding window than the layer will keep.
        for index in range(tokens):
            stock(input_ids=ids[:, index : index + 1], use_cache=True, **{cache_argument(stock): cache})
        held = sum(held_bytes(vars(layer)) for layer in cache.layers)
        windows = sum(layer.token_bytes for layer in shape.kv if layer.window and tokens >= layer.window)
        # transformers keeps one token less than the window: the new one is added when it comes.
        assert held in (shape.kv_bytes(tokens), shape.kv_bytes(tokens) - windows)
    assert shape.top_k == (TOP_K.get(family, shape.top_k[0]),) * len(shape.spec.layers)
    assert shape.num_layers == stock.config.num_hidden_layers
    assert (shape.hidden, shape.vocabulary) == (HIDDEN, VOCAB)


def test_the_shape_of_a_real_model():
    """By hand: 2 x 4 heads x 128 x 2 bytes a token and layer; attention and router of 18.9 M values a layer."""
    shape = probe_shape(shape_config("q30-48L"), torch.bfloat16)
    assert shape.kv == (KvLayer(2048, None, 0),) * 48
    assert shape.kv_bytes(1000) == 48 * 2048 * 1000
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128
    layer = attention + 2048 * 128 + 2 * 2048
    assert shape.layer_weights == 48 * layer + 2048
    assert shape.dense_bytes == 2 * (48 * layer + 2048 + 151936 * 2048)
    assert shape.plain_cache
    assert shape.max_context == 40960


def test_a_tied_head_is_read_as_well():
    config = shape_config("small")
    apart = probe_shape(config, torch.bfloat16)
    config.tie_word_embeddings = True
    tied = probe_shape(config, torch.bfloat16)
    assert tied.dense_bytes == apart.dense_bytes
    assert tied.spec.other_bytes == apart.spec.other_bytes - 1024 * 128 * 2


def test_windows_and_states():
    assert KvLayer(10, 4, 3).bytes_of(3) == 33
    assert KvLayer(10, 4, 3).bytes_of(9) == 43
    assert KvLayer(10, None, 0).bytes_of(9) == 90


def test_no_text_model():
    class Unknown(PretrainedConfig):
        model_type = "unknown"

    with pytest.raises(UnsupportedModelError, match="transformers has no text model for 'unknown'"):
        probe_shape(Unknown(), torch.bfloat16)
