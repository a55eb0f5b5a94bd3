"""Layers of a single token as one job: the same to the bit as module by module, if a layer is what it seems to be."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from greenroom.engine.cache_argument import cache_argument
from greenroom.engine.growing_cache import make_cache
from greenroom.engine.offload import offload_of
from greenroom.engine.single.layer_parts import layer_parts
from greenroom.engine.single.layers import SingleLayer
from greenroom.errors import EngineError
from greenroom.experts.cpu import CpuExperts
from tests.engine.offloaded import offloaded, random_ids, saved_family
from tests.reference.families import FAMILIES

BF16 = torch.bfloat16


@contextmanager
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Of the sequences that run inside the block, how many steps they have."""
    lengths: list[int] = []
    run = CpuExperts.run_sequence

    def noted(self, sequence, keep):
        lengths.append(len(sequence.native))
        run(self, sequence, keep)

    with monkeypatch.context() as patch:
        patch.setattr(CpuExperts, "run_sequence", noted)
        yield lengths


def forward(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache, **more: Any) -> Any:
    return model(input_ids=ids, **{cache_argument(model): cache}, **more)


@torch.no_grad()
def decode(model: PreTrainedModel, ids: torch.Tensor, prompt: int = 7) -> torch.Tensor:
    """Logits of each token behind the prompt, which are decoded one by one: [tokens, vocabulary]."""
    cache = make_cache(model)
    forward(model, ids[:, :prompt], cache)
    rows = [forward(model, ids[:, i : i + 1], cache).logits[0, -1] for i in range(prompt, ids.shape[1])]
    return torch.stack(rows)


@contextmanager
def module_by_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(SingleLayer, "_taken", lambda *_: None)
        yield


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if "input_layernorm" in dict(module.named_children())]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_to_the_bit_as_module_by_module(family, monkeypatch):
    with saved_family(family, BF16) as (_, folder), offloaded(folder, device="cpu") as model:
        ids = random_ids(1, 30)
        with module_by_module(monkeypatch), jobs(monkeypatch) as none:
            expected = decode(model, ids)
        counters = offload_of(model).manager.counters
        before = counters.table()
        counters.reset()
        with jobs(monkeypatch) as lengths:
            found = decode(model, ids)
        assert torch.equal(found, expected)
        assert (counters.table() == before).all()
        assert none == []
        if family == "qwen3_moe":
            assert lengths == [8] * model.config.num_hidden_layers * 23


# With norms of heads, without, with norms of all heads as one row; with biases, and shared experts, which are called.
# Values are as wide as the engine takes them, unlike those of the smallest models of these families.
@pytest.mark.parametrize(("family", "steps"), [("qwen3_moe", 8), ("mixtral", 8), ("olmoe", 8), ("qwen2_moe", 6)])
def test_families_whose_layers_are_taken(family, steps, monkeypatch):
    wide = saved_family(family, BF16, hidden_size=64, head_dim=16)
    with wide as (_, folder), offloaded(folder, device="cpu") as model:
        ids = random_ids(1, 30)
        with module_by_module(monkeypatch):
            expected = decode(model, ids)
        with jobs(monkeypatch) as lengths:
            assert torch.equal(decode(model, ids), expected)
        assert lengths == [steps] * model.config.num_hidden_layers * 23


def test_experts_in_slots_and_in_the_store():
    """Where an expert lies changes no bit, nor does it when it moves."""
    ids = random_ids(1, 120)
    with saved_family("qwen3_moe", BF16) as (_, folder):
        with offloaded(folder, device="cpu", cache_expert_num=0) as model:
            expected = decode(model, ids)
        for slots in (1, 5, 16):
            with offloaded(folder, device="cpu", cache_expert_num=slots) as model:
                manager = offload_of(model).manager
                assert torch.equal(decode(model, ids), expected)
                assert torch.equal(decode(model, ids), expected)
                manager.check_invariants()
                total = manager.counters.total()
                assert total.hits > 0
                assert total.misses == total.cpu
                assert slots == 16 or total.evictions > 0


def test_a_cache_that_is_cut_and_grows_beyond_its_room(monkeypatch):
    with saved_family("qwen3_moe", BF16) as (_, folder), offloaded(folder, device="cpu") as model:
        ids = random_ids(1, 200)

        @torch.no_grad()
        def run() -> torch.Tensor:
            cache, rows = make_cache(model), []
            forward(model, ids[:, :3], cache)
            for begin, end in ((3, 160), (20, 40)):
                if begin < cache.get_seq_length():
                    cache.crop(begin - cache.get_seq_length())
                rows += [forward(model, ids[:, i : i + 1], cache).logits for i in range(begin, end)]
            return torch.cat(rows)

        with module_by_module(monkeypatch):
            expected = run()
        with jobs(monkeypatch) as lengths:
            assert torch.equal(run(), expected)
        assert len(lengths) > 300


class Louder(nn.Module):
    """A dense layer around another, as adapters are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 1.5


def replace_a_projection(layer: nn.Module) -> None:
    layer.self_attn.v_proj = Louder(layer.self_attn.v_proj)


def replace_what_a_norm_does(layer: nn.Module) -> None:
    own = layer.post_attention_layernorm.forward
    layer.post_attention_layernorm.forward = lambda x: own(x) * 1.5


def listen_to_the_router(layer: nn.Module) -> None:
    layer.mlp.gate.register_forward_hook(lambda _, __, result: (result[0], result[1] * 1.5, result[2]))


def move_a_weight(layer: nn.Module) -> None:
    layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data * 2


def replace_a_weight(layer: nn.Module) -> None:
    layer.self_attn.q_norm.weight = nn.Parameter(layer.self_attn.q_norm.weight * 2, requires_grad=False)


def add_a_bias(layer: nn.Module) -> None:
    projection = layer.self_attn.q_proj
    projection.bias = nn.Parameter(torch.ones(projection.out_features, dtype=BF16), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "layers_left"),
    [(change, 1) for change in (replace_a_projection, replace_what_a_norm_does, listen_to_the_router)]
    + [(change, 0) for change in (move_a_weight, replace_a_weight, add_a_bias)],
)
def test_what_somebody_changes_is_done(change, layers_left, monkeypatch):
    """A layer of which a part was replaced, or is listened to, is left to its modules; new weights are read."""
    with saved_family("qwen3_moe", BF16) as (_, folder), offloaded(folder, device="cpu") as model:
        ids = random_ids(1, 20)
        before = decode(model, ids)
        change(layers_of(model)[0])
        with jobs(monkeypatch) as lengths:
            found = decode(model, ids)
        assert len(lengths) == 13 * (model.config.num_hidden_layers - layers_left)
        with module_by_module(monkeypatch):
            assert torch.equal(decode(model, ids), found)
        assert not torch.equal(found, before)


def test_a_layer_that_only_seems_to_be_a_usual_one(monkeypatch):
    """Its parts are, but what it does with them is not."""
    with saved_family("qwen3_moe", BF16) as (_, folder), offloaded(folder, device="cpu") as model:
        for layer in layers_of(model):
            single, own = layer.forward.__self__, layer.forward.__self__._own
            single._own = lambda *args, own=own, **kwargs: own(*args, **kwargs) * 1.25
        ids = random_ids(1, 20)
        with jobs(monkeypatch) as lengths:
            found = decode(model, ids)
        assert len(lengths) == model.config.num_hidden_layers  # tried once
        with module_by_module(monkeypatch):
            assert torch.equal(decode(model, ids), found)


def test_what_is_no_usual_layer():
    with saved_family("qwen3_moe", BF16) as (_, folder), offloaded(folder, device="cpu") as model:
        layer = layers_of(model)[0]
        assert layer_parts(layer) is not None
        scaling = layer.self_attn.scaling
        del layer.self_attn.scaling
        assert layer_parts(layer) is None
        layer.self_attn.scaling = scaling
        assert layer_parts(layer) is not None
        layer.add_module("more", nn.Identity())
        assert layer_parts(layer) is None
        del layer.more
        layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data.float()
        assert layer_parts(layer) is None
        assert layer_parts(nn.Identity()) is None


@torch.no_grad()
def test_a_batch_a_mask_and_a_strange_cache_go_module_by_module(monkeypatch):
    with saved_family("qwen3_moe", BF16) as (_, folder), offloaded(folder, device="cpu") as model:
        ids = random_ids(2, 12)
        with jobs(monkeypatch) as lengths:
            cache = make_cache(model)
            forward(model, ids[:, :11], cache)
            forward(model, ids[:, 11:], cache)
            model(input_ids=ids[:1, :1])
            for cache in (DynamicCache(), DynamicCache(config=model.config)):
                forward(model, ids[:1, :11], cache)
                forward(model, ids[:1, 11:], cache)
            cache, mask = make_cache(model), torch.tensor([[0] * 3 + [1] * 9])
            forward(model, ids[:1, :11], cache, attention_mask=mask[:, :11])
            forward(model, ids[:1, 11:], cache, attention_mask=mask)
            model.generate(ids[:1, :5], max_new_tokens=3, do_sample=False)
        assert lengths == []


@torch.no_grad()
def test_hidden_states_and_router_logits_are_those_of_the_modules(monkeypatch):
    with saved_family("qwen3_moe", BF16) as (_, folder), offloaded(folder, device="cpu") as model:
        ids, results = random_ids(1, 12), []
        for wanted in ({"output_hidden_states": True}, {"output_router_logits": True}):
            cache = make_cache(model)
            forward(model, ids[:, :11], cache)
            results.append(forward(model, ids[:, 11:], cache, **wanted))
        assert len(results[0].hidden_states) == model.config.num_hidden_layers + 1
        assert not torch.equal(results[0].hidden_states[1], results[0].hidden_states[2])
        assert [logits.shape[0] for logits in results[1].router_logits] == [1] * model.config.num_hidden_layers


@torch.no_grad()
def test_a_closed_engine_says_so_and_the_cache_can_be_dropped():
    with saved_family("qwen3_moe", BF16) as (_, folder), offloaded(folder, device="cpu") as model:
        cache, ids = make_cache(model), random_ids(1, 9)
        for begin, end in ((0, 7), (7, 8)):
            forward(model, ids[:, begin:end], cache)
        offload_of(model).engine.close()
        with pytest.raises(EngineError, match="closed"):
            forward(model, ids[:, 8:], cache)
