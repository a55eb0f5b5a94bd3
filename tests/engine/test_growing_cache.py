"""A KV cache that grows in place, against transformers' that copies."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from greenroom.engine import generation
from greenroom.engine.growing_cache import GrowingLayer, make_cache
from tests.engine.offloaded import offloaded, random_ids, saved_family
from tests.reference.tokenizer import make_tokenizer

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 200)),
        st.tuples(st.just("crop"), st.integers(1, 50)),
        st.tuples(st.sampled_from(["repeat", "select", "reset", "copy"]), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 2**31))
def test_it_holds_what_transformers_layer_holds(steps, seed):
    generator = torch.Generator().manual_seed(seed)
    growing, stock, batch = GrowingLayer(), DynamicLayer(), 2
    for name, number in steps:
        if name == "append":
            key, value = (torch.randn(batch, 3, number, dim, generator=generator) for dim in (4, 6))
            results = [layer.update(key, value) for layer in (growing, stock)]
            assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        elif not stock.is_initialized:
            continue
        elif name == "reset":
            growing.reset()
            stock.reset()
            batch = 2
        elif name == "copy":
            growing = copy.deepcopy(growing)
        elif name == "crop" and number < stock.get_seq_length():
            growing.crop(-number)
            stock.crop(-number)
        elif name == "repeat" and batch < 8:
            growing.batch_repeat_interleave(2)
            stock.batch_repeat_interleave(2)
            batch *= 2
        elif name == "select":
            for layer in (growing, stock):
                layer.batch_select_indices(torch.tensor([1, 0]))
            batch = 2
        assert growing.get_seq_length() == stock.get_seq_length()
        if stock.is_initialized:
            assert torch.equal(growing.keys, stock.keys)
            assert torch.equal(growing.values, stock.values)


def test_a_token_more_copies_nothing():
    layer, places = GrowingLayer(), set()
    layer.update(torch.zeros(1, 2, 100, 8), torch.zeros(1, 2, 100, 8))
    for _ in range(1000):
        keys, values = layer.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
        places.add((keys.data_ptr(), values.data_ptr()))
    assert keys.shape == (1, 2, 1100, 8)
    assert len(places) <= 8


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4", "qwen3_next"])
@torch.no_grad()
def test_models_compute_the_same_over_it(family):
    """Also with layers that keep something else, which stay as they are."""
    with saved_family(family) as (_, folder), offloaded(folder, device="cpu") as model:
        ids, logits = random_ids(1, 30), []
        for cache in (DynamicCache(config=model.config), make_cache(model)):
            rows = [model(input_ids=ids[:, :20], past_key_values=cache).logits[:, -1]]
            rows += [model(input_ids=ids[:, i : i + 1], past_key_values=cache).logits[:, -1] for i in range(20, 30)]
            logits.append(torch.stack(rows))
        assert any(type(layer) is GrowingLayer for layer in cache.layers)
    assert torch.equal(*logits)


def test_generate_uses_it(monkeypatch):
    made = []

    def noted(model):
        made.append(make_cache(model))
        return made[-1]

    monkeypatch.setattr(generation, "make_cache", noted)
    with saved_family("qwen3_moe") as (stock, folder), offloaded(folder, device="cpu") as model:
        prompt = [5, 6, 7, 8]
        expected = stock.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)
        result = generation.generate(model, make_tokenizer(), prompt, 9)
    assert list(result.token_ids) == expected[0, 4:].tolist()
    assert [layer.get_seq_length() for layer in made[0].layers] == [12] * len(made[0].layers)
