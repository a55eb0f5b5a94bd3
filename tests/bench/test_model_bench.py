"""Benchmarks of whole models: the model is a real one, the routing is what was asked for, the figures add up."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from greenroom.bench.bandwidth import measure_bandwidth
from greenroom.bench.model import bench_decode, bench_prefill
from greenroom.bench.shapes import SHAPES, shape_config
from greenroom.bench.synthetic import override_routing, random_model
from greenroom.config import OffloadConfig
from greenroom.engine.attach import RoutedExperts
from greenroom.engine.offload import close, offload_of
from greenroom.errors import ConfigError
from tests.reference.native_threads import engine_tasks, engine_tasks_left

CPU = OffloadConfig(device="cpu", cache_expert_num=0)


@pytest.fixture
def model():
    model = random_model(shape_config("small"), CPU)
    yield model
    close(model)


@torch.no_grad()
def test_a_random_model_equals_stock_with_the_same_weights(model):
    stock = AutoModelForCausalLM.from_config(shape_config("small"), dtype=torch.bfloat16).eval()
    missing, unexpected = stock.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected
    assert all(".experts." in name for name in missing)
    store = offload_of(model).manager.store
    for number, layer in enumerate(stock.model.layers):
        layer.mlp.experts.gate_up_proj.copy_(store.views(number).up)
        layer.mlp.experts.down_proj.copy_(store.views(number).down)
    ids = torch.randint(0, 1024, (2, 12))
    expected = stock(ids).logits.float()
    assert expected.std() > 0.05, "a model whose logits are all alike checks nothing"
    error = (model(ids).logits.float() - expected).norm() / expected.norm()
    assert error < 0.02


def test_experts_differ_from_each_other(model):
    blocks = offload_of(model).manager.store.blocks(0)
    assert len({bytes(block[:4096].numpy()) for block in blocks}) == len(blocks)


def chosen_ids(model) -> list[torch.Tensor]:
    """Records what reaches each layer's experts in one forward of 32 tokens."""
    seen: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            layer = module.offloaded
            forward = layer.forward
            layer.forward = lambda h, ids, w, forward=forward: (seen.append(ids.clone()), forward(h, ids, w))[1]
    with torch.no_grad():
        model(torch.randint(0, 1024, (1, 32)))
    return seen


def test_uniform_routing_is_drawn_afresh_and_distinct(model):
    override_routing(model, "uniform")
    first, second = chosen_ids(model)
    assert first.shape == (32, 4)
    assert all(len(set(row.tolist())) == 4 for row in first)
    assert not torch.equal(first, second)
    assert len(first.unique()) == 16


def test_a_trace_is_replayed(model, tmp_path):
    trace = np.random.default_rng(0).integers(0, 16, (50, 2, 4))
    np.save(tmp_path / "trace.npy", trace)
    override_routing(model, str(tmp_path / "trace.npy"))
    for layer, ids in enumerate(chosen_ids(model)):
        assert ids.tolist() == trace[:32, layer].tolist()


@pytest.mark.parametrize("array", [None, np.zeros((3, 2)), np.zeros((3, 5, 4), dtype=int), np.zeros((3, 2, 4))])
def test_a_trace_that_does_not_fit_is_refused(model, tmp_path, array):
    if array is not None:
        np.save(tmp_path / "trace.npy", array)
    with pytest.raises(ConfigError, match="trace"):
        override_routing(model, str(tmp_path / "trace.npy"))


@pytest.mark.parametrize("slots", [0, 8, 16])
def test_decode_counts_what_it_did(slots):
    knobs = OffloadConfig(device="cpu", cache_expert_num=slots)
    (result,) = bench_decode("small", [2], knobs, "uniform", steps=2, repeats=2)
    assert (result.bench, result.unit, result.batch, result.cache_expert_num) == ("decode", "tok/s", 2, slots)
    block = shape_config("small").hidden_size * shape_config("small").moe_intermediate_size * 3 * 2
    assert result.value > 0
    assert result.miss_bytes % 1 == 0
    assert 0 <= result.miss_bytes <= 2 * 2 * 4 * block
    assert (result.miss_bytes == 0) == (slots == 16)
    assert (result.bound is None) == (slots == 16)
    assert (result.hit_rate == 0) == (slots == 0)
    json.dumps(result.to_dict())


@pytest.mark.parametrize("dbo", ["off", "auto"])
def test_decode_as_it_is_served(dbo):
    result = next(bench_decode("small", [3], CPU, "uniform", steps=2, repeats=2, dbo=dbo)).to_dict()
    assert (result["bench"], result["batch"], result["hit_rate"]) == ("decode", 3, 0)
    block = shape_config("small").hidden_size * shape_config("small").moe_intermediate_size * 3 * 2
    assert 4 * 2 * block <= result["miss_bytes"] <= 3 * 2 * 4 * block
    because = "decode steps are no graphs, since the model runs on the CPU, which has no graphs"
    assert result["dbo"]["mode"] == dbo
    if dbo == "auto" and not torch.cuda.is_available():
        assert result["dbo"] == {"mode": "auto", "off_because": because, "choices": []}
    json.dumps(result)
    assert next(bench_decode("small", [1], CPU, "uniform", steps=1, repeats=1)).dbo is None


def test_halves_go_on_from_places_of_their_own(model, tmp_path):
    """Those of one batch run at once, so neither may move the other's; and they must not choose alike."""
    trace = np.random.default_rng(0).integers(0, 16, (50, 2, 4))
    np.save(tmp_path / "trace.npy", trace)
    override_routing(model, str(tmp_path / "trace.npy"))
    layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    seen: dict[str, list[list[int]]] = {"first": [], "second": []}

    class Half:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, _weights: torch.Tensor) -> torch.Tensor:
            if layer == 0:
                seen[self.name] += ids.tolist()
            return hidden

    manager = offload_of(model).manager
    halves = [Half("first"), Half("second")]
    for _ in range(3):
        for half in halves:
            with manager.without_host(half.run):
                for layer in layers:
                    layer(torch.zeros(5, 128, dtype=torch.bfloat16), torch.zeros(5, 4).long(), torch.zeros(5, 4))
    assert seen["first"] == trace[:15, 0].tolist()
    assert seen["second"] == trace[25:40, 0].tolist()


def test_prefill():
    (result,) = bench_prefill("small", 1, [32], CPU, "own", repeats=2)
    assert (result.bench, result.tokens) == ("prefill", 32)
    assert result.value > 0


@pytest.fixture
def models_made(monkeypatch) -> list[torch.nn.Module]:
    made: list[torch.nn.Module] = []

    def make(*arguments):
        made.append(random_model(*arguments))
        return made[-1]

    monkeypatch.setattr("greenroom.bench.model.random_model", make)
    return made


@pytest.fixture
def bandwidths(monkeypatch) -> list[int]:
    """Threads of each measurement, all of which find the same."""
    calls: list[int] = []

    def measure(threads):
        calls.append(threads)
        return SimpleNamespace(cpu_alone=10.0, cpu_together=None, copy_together=20.0)

    monkeypatch.setattr("greenroom.bench.model.measure_bandwidth", measure)
    return calls


def test_several_results_of_one_model(models_made, bandwidths):
    results = bench_decode("small", [1, 3], CPU, "uniform", steps=2, repeats=1)
    assert not models_made
    first = next(results)
    offload = offload_of(models_made[0])
    second = next(results)
    assert offload_of(models_made[0]) is offload
    assert [(r.batch, r.tokens) for r in (first, second)] == [(1, 2), (3, 2)]
    assert second.miss_bytes > first.miss_bytes
    assert list(results) == []
    assert [r.tokens for r in bench_prefill("small", 1, [8, 5], CPU, "uniform", repeats=1)] == [8, 5]
    assert (len(models_made), len(bandwidths)) == (2, 2)


def test_results_left_unread_end_the_model(bandwidths):
    before = len(engine_tasks())
    results = bench_decode("small", [1, 2], CPU, "uniform", steps=1, repeats=1)
    next(results)
    assert len(engine_tasks()) > before
    results.close()
    assert engine_tasks_left(before) == before


@pytest.mark.parametrize("dbo", [None, "off"])
def test_each_result_is_routed_from_the_beginning(bandwidths, tmp_path, dbo):
    """What a result misses is then the same whatever came before it."""
    steps, repeats, prompt = 2, 1, 64
    trace = np.zeros((200, 2, 4), dtype=int)
    trace[:] = range(4)
    # Of the timed steps' tokens, behind those of the prompt and of two runs that warm up, the second has one choice.
    timed = prompt + 2 * steps
    trace[timed + 1] = 0
    np.save(tmp_path / "trace.npy", trace)
    results = [*bench_decode("small", [1, 1, 1], CPU, str(tmp_path / "trace.npy"), steps, repeats, dbo=dbo)]
    block = shape_config("small").hidden_size * shape_config("small").moe_intermediate_size * 3 * 2
    assert [r.miss_bytes for r in results] == [2 * block * (4 + 1) / steps] * 3


def test_a_cache_keeps_what_the_result_before_left(bandwidths, tmp_path):
    np.save(tmp_path / "trace.npy", np.zeros((8, 2, 4), dtype=int) + range(4))
    knobs = OffloadConfig(device="cpu", cache_expert_num=8)
    results = [*bench_decode("small", [1, 2], knobs, str(tmp_path / "trace.npy"), steps=2, repeats=1)]
    assert [r.hit_rate for r in results] == [1, 1]


@pytest.mark.parametrize(
    ("batches", "named"),
    [
        ([1, 0], {}),
        ([1], {"steps": 0}),
        ([1], {"repeats": 0}),
        ([1], {"dbo": "maybe"}),
        ([1], {"dbo": "off", "graph": False}),
        ([1, 33], {"dbo": "off"}),
        ([2, 1], {"dbo": "on"}),
    ],
)
def test_bad_numbers_are_refused_before_a_model_is_made(models_made, batches, named):
    with pytest.raises(ConfigError):
        bench_decode("small", batches, CPU, "own", **named)
    assert not models_made


def test_bad_lengths_and_shapes_are_refused_before_a_model_is_made(models_made):
    with pytest.raises(ConfigError, match="tokens must be at least 1"):
        bench_prefill("small", 1, [8, 0], CPU, "own")
    with pytest.raises(ConfigError, match="unknown shape"):
        next(bench_decode("huge", [1], CPU, "own"))
    assert not models_made


def test_shapes_are_what_they_are_called():
    assert set(SHAPES) >= {"q30-12L", "q30-48L"}
    for name, layers in (("q30-12L", 12), ("q30-48L", 48)):
        config = shape_config(name)
        assert (config.num_hidden_layers, config.hidden_size, config.num_experts) == (layers, 2048, 128)
        assert (config.moe_intermediate_size, config.num_experts_per_tok) == (768, 8)


def test_bandwidth_is_no_more_than_the_machine_has():
    started = time.perf_counter()
    result = measure_bandwidth(threads=1)
    assert 0.5 < result.cpu_alone < 100
    assert time.perf_counter() - started < 60
    assert (result.copy is None) == (not torch.cuda.is_available())
    assert result.value == (result.cpu_alone if result.copy is None else result.cpu_together + result.copy_together)


def test_a_refused_benchmark_ends_its_threads():
    before = len(engine_tasks())
    with pytest.raises(ConfigError):
        next(bench_decode("small", [1], CPU, "no such trace.npy"))
    assert engine_tasks_left(before) == before


def test_offloaded_weights_are_part_of_the_result():
    knobs = OffloadConfig(device="cpu", cache_expert_num=0, weights_offload_group_size=2, weights_offload_params="attn")
    result = next(bench_decode("small", [1], knobs, "uniform", steps=2, repeats=1)).to_dict()
    # One layer of two: with a buffer of its own it stays there.
    assert result["weights_offload"].startswith("prefetch, 6 weights of 1 of 2 layers")
    assert result["weight_bytes"] == 0
    both = OffloadConfig(device="cpu", cache_expert_num=0, weights_offload_group_size=1, weights_offload_params="attn")
    result = next(bench_decode("small", [1], both, "uniform", steps=2, repeats=1)).to_dict()
    attention = 2 * (2 * 128 * 128 + 2 * 128 * 64)
    assert result["weight_bytes"] == 2 * (attention + 2 * 256)
    assert next(bench_decode("small", [1], CPU, "uniform", steps=2, repeats=1)).weights_offload == "none"
