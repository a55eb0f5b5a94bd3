"""Tokens of engines with the plugin are those of stock vLLM's, for families, cache sizes and ways to run."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.vllm_plugin.engines import engine, greedy, offload, run

TINY_MOE = Path(__file__).parents[2] / "examples" / "tiny-moe"

CLOSE = 0.375
"""Of two log probabilities from logits in bfloat16: six of its steps, which are 1/16 from 8 to 16."""

pytestmark = pytest.mark.usefixtures("vllm_environment")


@pytest.mark.parametrize(
    ("family", "dtype", "sizes"),
    [
        ("qwen3_moe", torch.float32, (0, 4, 16)),
        ("qwen2_moe", torch.bfloat16, (5,)),
        ("mixtral", torch.float32, (2, 8)),
        ("deepseek_v2", torch.bfloat16, (0, 6)),
        ("gpt_oss", torch.float32, (3,)),
        ("gpt_oss", torch.bfloat16, (16,)),
    ],
)
def test_tokens_are_those_of_stock_vllm(family, dtype, sizes, tiny_model):
    model, name = tiny_model(family, dtype), str(dtype).removeprefix("torch.")
    stock = run(model, dtype=name)
    assert stock.stats is None
    assert len({token for tokens in stock.tokens for token in tokens}) > 20, "the model says more than one thing"
    for size in sizes:
        plugged = run(model, dtype=name, **offload(size))
        margins = stock.margins(plugged.tokens)
        if dtype == torch.float32:
            assert not margins, f"{size} slots"
        # Processors round bfloat16 in different orders: tokens may part where they are as good as equal.
        assert all(margin <= CLOSE for margin in margins), f"{size} slots: {margins}"
        check_counters(plugged.stats, size, experts=8 if family == "mixtral" else 16)


def check_counters(stats, slots, experts):
    total = stats["total"]
    assert total["hits"] + total["misses"] > 0
    assert total["misses"] == total["streamed"] + total["cpu"]
    assert (total["hits"] == 0) == (slots == 0)
    assert (total["misses"] == 0) == (slots >= experts)
    for name, count in total.items():
        assert count == sum(layer[name] for layer in stats["layers"])


def test_a_trained_model_with_text_and_stops():
    from vllm import SamplingParams

    prompts = ["In the beginning", "The quick brown fox", "It was a dark and stormy night, and"]
    sampling = SamplingParams(max_tokens=48, temperature=0)
    texts = []
    for arguments in ({}, offload(8, policy="lru", cache_topk=2, update_expert_num=1)):
        with engine(TINY_MOE, skip_tokenizer_init=False, **arguments) as llm:
            texts.append([out.outputs[0].text for out in llm.generate(prompts, sampling, use_tqdm=False)])
    assert texts[0] == texts[1]
    assert all(texts[0])


def test_prefix_caching_and_chunked_prefill(tiny_model):
    """With chunks of 32 tokens, and prompts of which the second pass finds a part in the prefix cache."""
    model = tiny_model("qwen3_moe", torch.float32)
    ways = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 32}
    stock, plugged = run(model, **ways), run(model, **ways, **offload(4))
    assert plugged.tokens == stock.tokens


def test_torch_compile(tiny_model):
    """The compiler sees one operator in the experts' place."""
    model = tiny_model("qwen3_moe", torch.float32)
    stock = run(model, enforce_eager=False)  # rounds otherwise than eagerly
    compiled = run(model, enforce_eager=False, **offload(4))
    assert compiled.tokens == stock.tokens
    assert compiled.stats["total"]["hits"] > 0


def test_warm_up_and_profiling_leave_no_trace(tiny_model):
    with engine(tiny_model("qwen3_moe", torch.float32), **offload(4)) as llm:
        stats = llm.collective_rpc("moe_offload_stats")[0]
        assert not any(stats["total"].values())
        greedy(llm, tokens=1, lengths=(1,))
        total = llm.collective_rpc("moe_offload_stats")[0]["total"]
    assert total["hits"] + total["misses"] == 3 * 4, "one token, three layers, four choices"


def test_an_engine_without_offloading_after_one_with_it_is_stock(tiny_model):
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    model = tiny_model("qwen3_moe", torch.float32)
    plugged = run(model, **offload(4))
    with engine(model) as llm:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        assert type(worker).__module__.startswith("vllm.")
        layers = [module for module in worker.get_model().modules() if isinstance(module, RoutedExperts)]
        assert len(layers) == 3
        for layer in layers:
            assert type(layer.quant_method) is UnquantizedFusedMoEMethod
            assert {"w13_weight", "w2_weight"} <= dict(layer.named_parameters()).keys()
        assert greedy(llm) + greedy(llm) == plugged.tokens


def test_made_up_weights(tiny_model):
    """vLLM's load format "dummy": experts differ, nothing is NaN, and it generates."""
    with engine(tiny_model("qwen3_moe", torch.float32), load_format="dummy", **offload(4)) as llm:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        up = worker.steps.manager.store.views(0).up
        assert 0 < up.abs().max() <= 1e-3
        assert len({float(expert.sum()) for expert in up}) == len(up)
        assert len(greedy(llm, tokens=4)) == 5


def test_names_of_offloaded_experts_are_known_to_a_loader_that_tracks_them(tiny_model, monkeypatch):
    """vLLM 0.26 leaves it to a module's own names which experts need not be reported as loaded."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    track = DefaultModelLoader.track_weights_loading

    def forgetful(self, model, loaded_weights, *args, **kwargs):
        track(self, model, {name for name in loaded_weights if ".experts." not in name}, *args, **kwargs)

    monkeypatch.setattr(DefaultModelLoader, "track_weights_loading", forgetful)
    with engine(tiny_model("qwen3_moe", torch.float32), **offload(4)) as llm:
        assert len(greedy(llm, tokens=4)) == 5


def test_a_worker_that_cannot_load_keeps_nothing(tiny_model, monkeypatch):
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from greenroom.vllm_plugin.rank import RankExperts

    closed = []
    close = RankExperts.close
    monkeypatch.setattr(RankExperts, "close", lambda self: (closed.append(len(self._stores)), close(self)))
    monkeypatch.setattr(
        DefaultModelLoader, "track_weights_loading", lambda *_, **__: (_ for _ in ()).throw(ValueError("torn file"))
    )
    with pytest.raises(ValueError, match="torn file"), engine(tiny_model("qwen3_moe", torch.float32), **offload(4)):
        pass
    assert closed == [3], "three layers had memory"


def test_a_worker_that_fails_when_all_is_loaded_keeps_nothing(tiny_model, monkeypatch):
    from greenroom.vllm_plugin import worker
    from greenroom.vllm_plugin.rank import RankExperts
    from greenroom.vllm_plugin.steps import StepDriver

    closed = []
    close = RankExperts.close
    monkeypatch.setattr(StepDriver, "close", lambda self: closed.append("steps"))
    monkeypatch.setattr(RankExperts, "close", lambda self: (closed.append("experts"), close(self)))
    monkeypatch.setattr(worker, "CounterFile", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"), engine(tiny_model("qwen3_moe", torch.float32), **offload(4)):
        pass
    assert closed == ["steps", "experts"]


def test_too_little_host_memory_is_refused_before_weights_are_read(tiny_model, monkeypatch):
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from greenroom import hardware
    from greenroom.errors import MemoryLimitError

    monkeypatch.setattr(DefaultModelLoader, "load_weights", lambda *_, **__: pytest.fail("weights are being read"))
    monkeypatch.setattr(hardware, "available_host_bytes", lambda: 1 << 20)
    with (
        pytest.raises(MemoryLimitError, match=r"needs 0\.00 GiB and those before it .* free memory"),
        engine(tiny_model("qwen3_moe", torch.float32), **offload(4)),
    ):
        pass


@pytest.mark.parametrize(
    "ways",
    [
        {},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ],
    ids=["one worker", "shards of experts", "half of the experts"],
)
def test_engines_in_processes_of_their_own(tiny_model, vllm_environment, ways):
    """The default engine; two workers have shards of every expert, or half of the experts each."""
    model = tiny_model("qwen2_moe", torch.float32)
    stock = run(model)
    vllm_environment.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    plugged = run(model, **ways, **offload(4))
    assert plugged.tokens == stock.tokens
    assert plugged.stats["total"]["hits"] > 0
