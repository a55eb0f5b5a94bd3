"""Flags on vLLM's own command line and in ``LLM(...)``, and what they do not go together with."""

import argparse
import dataclasses
import logging

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from greenroom.errors import ConfigError, GreenroomError
from greenroom.vllm_plugin import register
from greenroom.vllm_plugin.conflicts import CPU_WORKER, MAX_GRAPH_TOKENS, check_config
from greenroom.vllm_plugin.options import FLAGS
from tests.vllm_plugin.engines import engine, offload

pytestmark = pytest.mark.usefixtures("vllm_environment")


@pytest.fixture
def model(tiny_model):
    return str(tiny_model("qwen3_moe", torch.float32))


def parse(*words):
    return AsyncEngineArgs.from_cli_args(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args([*words]))


def test_flags_are_in_the_help():
    text = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).format_help()
    for flag in FLAGS:
        assert "--" + flag.name.replace("_", "-") in text
    assert "--no-moe-offload" in text


def test_without_flags_arguments_are_vllms_own(model):
    register()
    args = parse("--model", model)
    assert args.additional_config == {}
    assert args.worker_cls == "auto"
    assert args.create_engine_config().parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert {field.name for field in dataclasses.fields(EngineArgs)}.isdisjoint(flag.name for flag in FLAGS)
    with pytest.raises(TypeError, match="moe_onload"):
        EngineArgs(model=model, moe_onload=True)


def test_every_flag_on_the_command_line(model):
    words = "--moe-offload --moe-offload-cache-expert-num 3 --moe-offload-cache-topk 2 --moe-offload-policy lfu "
    words += "--moe-offload-update-expert-num 1 --moe-offload-context-num-threads 2"
    args = parse("--model", model, *words.split())
    expected = {
        "cache_expert_num": 3,
        "cache_topk": 2,
        "update_expert_num": 1,
        "context_num_threads": 2,
        "policy": "lfu",
    }
    assert args.additional_config == {"moe_offload": expected}
    config = args.create_engine_config()
    assert config.additional_config == {"moe_offload": expected}
    assert config.parallel_config.worker_cls == CPU_WORKER


def test_keyword_arguments_are_the_same(model):
    short = EngineArgs(model=model, moe_expert_cache_size=5)
    assert short.additional_config["moe_offload"]["cache_expert_num"] == 5
    assert parse("--model", model, "--moe-expert-cache-size", "5").additional_config == short.additional_config
    long = EngineArgs(model=model, moe_offload=True, moe_offload_cache_expert_num=5)
    assert long.additional_config == short.additional_config
    other = EngineArgs(model=model, additional_config={"mine": 1}, moe_offload=True)
    assert other.additional_config["mine"] == 1
    assert "moe_offload" in other.additional_config


def test_options_are_part_of_the_hash_of_compiled_graphs(model):
    hashes = {
        EngineArgs(model=model, **arguments).create_engine_config().compute_hash()
        for arguments in ({}, {"moe_expert_cache_size": 1}, {"moe_expert_cache_size": 2})
    }
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--moe-offload-policy lru", "needs --moe-offload"),
        ("--moe-expert-cache-size 2 --moe-offload-cache-expert-num 2", "give one of them"),
        ("--moe-expert-cache-size -1", "at least 0"),
        ("--moe-offload --moe-offload-policy magic", "magic"),
        ('--moe-offload --additional-config {"moe_offload":true}', "configured twice"),
    ],
)
def test_flags_that_make_no_sense(model, words, says):
    with pytest.raises(ConfigError, match=says):
        parse("--model", model, *words.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"cpu_offload_gb": 4}, "--cpu-offload-params"),
        ({"cpu_offload_gb": 4, "cpu_offload_params": {"self_attn", "mlp.experts"}}, "--cpu-offload-params"),
        ({"offload_group_size": 2}, "--offload-params"),
        ({"offload_group_size": 2, "offload_params": {"w13_weight"}}, "--offload-params"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"enable_elastic_ep": True}, "--enable-elastic-ep"),
        ({"enable_dbo": True}, "--enable-dbo"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"worker_cls": "my.Worker"}, "remove --worker-cls"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"compilation_config": {"mode": 1}}, "compilation mode 1"),
    ],
)
def test_options_that_offloading_does_not_go_together_with(model, arguments, says):
    with pytest.raises(ConfigError, match=says):
        EngineArgs(model=model, moe_offload=True, **arguments).create_engine_config()


def test_attention_may_be_offloaded_beside(model):
    arguments = {"cpu_offload_gb": 4, "cpu_offload_params": {"self_attn"}}
    EngineArgs(model=model, moe_offload=True, **arguments).create_engine_config()


def test_graphs_larger_than_a_step_without_the_host(model):
    config = EngineArgs(model=model, moe_offload=True).create_engine_config()
    config.compilation_config.cudagraph_capture_sizes = [1, MAX_GRAPH_TOKENS]
    check_config(config)
    config.compilation_config.cudagraph_capture_sizes = [1, 2 * MAX_GRAPH_TOKENS]
    with pytest.raises(ConfigError, match="give cudagraph_capture_sizes up to 32"):
        check_config(config)


def test_a_dense_model_is_refused(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)  # fmt: skip
    with pytest.raises(ConfigError, match="for models with routed experts"):
        EngineArgs(model=str(tmp_path), moe_offload=True, skip_tokenizer_init=True).create_engine_config()


def test_quantised_experts_are_refused(model):
    with (
        pytest.raises((GreenroomError, RuntimeError), match="does not support experts quantised by"),
        engine(model, dtype="bfloat16", quantization="fp8", **offload(2)),
    ):
        pass


def test_sleep_level_2_and_reloading_are_refused(model):
    with engine(model, **offload(2)) as llm:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        with pytest.raises(ConfigError, match="use level 1"):
            worker.sleep(level=2)
        with pytest.raises(ConfigError, match="start the engine anew"):
            worker.reload_weights()


def test_a_worker_class_of_ours_without_options(model):
    with pytest.raises(ConfigError, match="add it, or remove --worker-cls"), engine(model, worker_cls=CPU_WORKER):
        pass


def test_an_old_vllm_is_refused(model, monkeypatch):
    monkeypatch.setattr("greenroom.vllm_plugin.arguments.vllm_version", lambda: "0.20.1")
    with pytest.raises(ConfigError, match=r"0\.26 or later"):
        EngineArgs(model=model, moe_offload=True).create_engine_config()
    assert EngineArgs(model=model).create_engine_config() is not None


def test_an_unknown_vllm_is_warned_about_once(model, monkeypatch):
    monkeypatch.setattr("greenroom.vllm_plugin.arguments.vllm_version", lambda: "0.99.0")
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("vllm.greenroom").addHandler(handler)
    try:
        for _ in range(2):
            EngineArgs(model=model, moe_offload=True).create_engine_config()
    finally:
        logging.getLogger("vllm.greenroom").removeHandler(handler)
    assert ["0.99.0" in record.getMessage() for record in records] == [True]


def test_registering_twice_changes_nothing():
    before = EngineArgs.add_cli_args, EngineArgs.__init__, EngineArgs.create_engine_config
    register()
    assert (EngineArgs.add_cli_args, EngineArgs.__init__, EngineArgs.create_engine_config) == before
    namespace = argparse.Namespace(**vars(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args([])))
    assert namespace.moe_offload is None
