"""load and its errors: one sentence each, and nothing stays behind."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import greenroom
from greenroom import hardware
from greenroom.engine import offload
from greenroom.errors import CheckpointError, ConfigError, GreenroomError, MemoryLimitError, UnsupportedModelError
from tests.engine.offloaded import offloaded, random_ids, save_family
from tests.reference.native_threads import engine_tasks, engine_tasks_left
from tests.reference.tokenizer import make_tokenizer


@pytest.fixture
def folder(tmp_path) -> Path:
    save_family("qwen3_moe", tmp_path, torch.bfloat16)
    return tmp_path


def edit_weights(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def refuse(folder: Path, error: type[GreenroomError], *words: str, **knobs) -> None:
    """Loading fails with one sentence that has all the words, and leaves no thread and no memory."""
    threads = threading.active_count()
    engines = len(engine_tasks())
    with pytest.raises(error) as caught:
        greenroom.load(folder, progress=False, device="cpu", **knobs)
    for word in words:
        assert word in str(caught.value), f"'{word}' is missing in: {caught.value}"
    assert threading.active_count() == threads
    assert engine_tasks_left(engines) == engines, "an engine was left running"


def test_the_model_is_an_ordinary_transformers_model(folder):
    with offloaded(folder, cache_expert_num=2, device="cpu") as model:
        assert type(model).__name__ == "Qwen3MoeForCausalLM"
        assert not hasattr(model, "hf_quantizer")
        assert not getattr(model, "is_quantized", False)
        assert not hasattr(model.config, "quantization_config")
        assert not any(".experts." in name for name, _ in model.named_parameters())
        assert not model.training


def test_stats_reset_and_close(folder):
    model, tokenizer = greenroom.load(folder, progress=False, device="cpu", cache_expert_num=2, policy="lru")
    assert tokenizer("a")["input_ids"]
    model(random_ids(1, 5))
    stats = greenroom.stats(model)
    assert len(stats.layers) == 2
    assert stats.total.misses == sum(layer.misses for layer in stats.layers) > 0
    assert (stats.policy, stats.device, stats.cache_expert_num) == ("lru", "cpu", 2)
    assert stats.load_seconds > 0
    as_json = json.loads(json.dumps(stats.to_dict()))
    assert as_json["total"]["copies"] == stats.total.copies
    greenroom.reset_stats(model)
    assert greenroom.stats(model).total.misses == 0
    greenroom.close(model)
    greenroom.close(model)
    assert engine_tasks_left(0) == 0
    with pytest.raises(RuntimeError, match="not loaded, or the model was closed"):
        model(random_ids(1, 5))


def test_a_failing_forward_does_not_block_the_next(folder):
    with offloaded(folder, device="cpu") as model:
        with pytest.raises(IndexError):
            model(torch.tensor([[10**6]]))
        model(random_ids(1, 3))


def test_an_interrupted_forward_does_not_block_the_next(folder, monkeypatch):
    """torch calls no hooks behind an interrupt."""

    def interrupted(*args):
        raise KeyboardInterrupt

    with offloaded(folder, device="cpu") as model:
        expected = model(random_ids(1, 3)).logits
        with monkeypatch.context() as patch:
            patch.setattr("greenroom.experts.host_tier.HostTier.run_undecided", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(random_ids(1, 3))
        assert torch.equal(model(random_ids(1, 3)).logits, expected)


def test_progress_is_reported_to_a_function(folder):
    seen: list[tuple[int, int]] = []
    model, _ = greenroom.load(folder, progress=lambda done, total: seen.append((done, total)), device="cpu")
    greenroom.close(model)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_models_that_load_did_not_make_are_refused(folder):
    with pytest.raises(ConfigError, match="was not loaded by greenroom"):
        greenroom.stats(torch.nn.Linear(1, 1))


def test_not_an_moe_model(tmp_path):
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=260
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    refuse(tmp_path, UnsupportedModelError, "LlamaForCausalLM has no routed experts")


def test_folders_that_hold_no_model(tmp_path):
    refuse(tmp_path, CheckpointError, "has no config.json")
    refuse(tmp_path / "missing", CheckpointError, "there is no folder")
    refuse(Path("nobody/nothing"), CheckpointError, "is no folder here and cannot be downloaded")
    (tmp_path / "file").write_text("")
    refuse(tmp_path / "file", CheckpointError, "is a file")


def test_unknown_model_type(folder):
    edit_config(folder, model_type="never_heard_of")
    refuse(folder, UnsupportedModelError, "cannot read", "never_heard_of")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "many"}, "hidden_size"),
        ({"hidden_size": -128}, "-128"),
        ({"hidden_act": "nope"}, "KeyError: 'nope'"),
        ({"dtype": "bloat16"}, "bloat16"),
    ],
)
def test_configurations_of_which_no_model_can_be_made(folder, changes, words):
    edit_config(folder, **changes)
    refuse(folder, UnsupportedModelError, "transformers", words)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float64", "int8", "no"])
def test_unknown_dtypes(folder, dtype):
    refuse(folder, ConfigError, f"unknown dtype '{dtype}'", dtype=dtype)


def test_missing_file(folder):
    (folder / "model.safetensors").unlink()
    refuse(folder, CheckpointError, "safetensors")


def test_missing_shard(tmp_path):
    model = save_family("qwen3_moe", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    refuse(tmp_path, CheckpointError, shard.name)


def test_truncated_and_corrupt_files_name_the_file(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) - 1000])
    refuse(folder, CheckpointError, "model.safetensors")
    file.write_bytes(b"\xff" * 100 + whole[100:])
    refuse(folder, CheckpointError, "model.safetensors")


def test_a_missing_expert_is_named(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        name = next(n for n in sorted(file.keys()) if ".experts." in n)
    edit_weights(folder, lambda tensors: tensors.pop(name))
    refuse(folder, CheckpointError, name)


def test_an_expert_of_the_wrong_shape_is_named(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        name = next(n for n in sorted(file.keys()) if ".experts." in n)
    edit_weights(folder, lambda tensors: tensors.update({name: tensors[name][..., :-1].contiguous()}))
    refuse(folder, CheckpointError, name, "model.safetensors")


def test_another_weight_missing_or_of_the_wrong_shape(folder):
    name = "model.layers.0.self_attn.q_proj.weight"
    edit_weights(folder, lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
    refuse(folder, CheckpointError, name)
    edit_weights(folder, lambda tensors: tensors.pop(name))
    refuse(folder, CheckpointError, name)


@pytest.mark.parametrize("method", ["fp8", "gptq", "mxfp4"])
def test_quantised_checkpoints_are_named(folder, method):
    edit_config(folder, quantization_config={"quant_method": method, "bits": 4, "group_size": 128})
    refuse(folder, UnsupportedModelError, method)


def test_no_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    refuse(folder, CheckpointError, "tokenizer")


def test_not_enough_host_memory(folder, monkeypatch):
    monkeypatch.setattr(hardware, "available_host_bytes", lambda: 1 << 16)
    refuse(folder, MemoryLimitError, "not enough host memory", "GiB are available")


def test_memory_that_cannot_be_locked(folder, monkeypatch):
    def lock(address, size):
        raise MemoryLimitError("cannot page-lock 1 GiB")

    monkeypatch.setattr(offload.hardware, "lock_pages", lock)
    monkeypatch.setattr(offload, "HostStore", lambda *a, **k: _locking_store(lock, *a))
    refuse(folder, MemoryLimitError, "cannot page-lock")


def _locking_store(lock, formats, counts):
    from greenroom.experts.store import HostStore

    return HostStore(formats, counts, lock, lambda address: None)


@pytest.mark.parametrize(
    ("knobs", "error", "words"),
    [
        ({"policy": "best"}, ConfigError, "unknown policy 'best'"),
        ({"isa": "sse9"}, ConfigError, "sse9"),
        ({"cache_expert_num": -1}, ConfigError, "at least 0"),
        ({"cache_expert_num": 1, "vram": "1GiB"}, ConfigError, "not both"),
        ({"slots": 3}, ConfigError, "unknown option 'slots'"),
        ({"dtype": "int7"}, ConfigError, "unknown dtype 'int7'"),
        ({"config": greenroom.OffloadConfig(), "policy": "lru"}, ConfigError, "not both"),
    ],
)
def test_bad_knobs(folder, knobs, error, words):
    refuse(folder, error, words, **knobs)


def test_bad_devices(folder):
    with pytest.raises(ConfigError, match="unknown device 'tpu'"):
        greenroom.load(folder, device="tpu")
    with pytest.raises(ConfigError, match="torch sees"):
        greenroom.load(folder, device="cuda:99")


@pytest.mark.cuda
def test_not_enough_device_memory(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 16, 1 << 16))
    with pytest.raises(MemoryLimitError, match="not enough device memory"):
        greenroom.load(folder, device="cuda", cache_expert_num=2)


@pytest.mark.cuda
def test_device_memory_is_as_planned(folder):
    before = torch.cuda.memory_allocated()
    with offloaded(folder, device="cuda", cache_expert_num=4) as model:
        plan = offload.offload_of(model).plan
        used = torch.cuda.memory_allocated() - before
        # The caching allocator rounds each tensor up to 512 bytes.
        assert plan.device_bytes <= used <= plan.device_bytes * 1.2 + 200_000
        assert greenroom.stats(model).page_locked


def test_a_loaded_model_can_be_compiled(folder):
    """Experts and the hooks around steps stay out of what is compiled."""
    ids = torch.arange(3, 9)[None]
    with offloaded(folder, cache_expert_num=2, device="cpu") as model:
        expected = model(ids).logits
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(ids).logits, expected)
        assert greenroom.stats(model).total.hits > 0
        torch._dynamo.reset()


def test_a_profile_of_another_model_is_refused_before_anything_is_read(folder, tmp_path, monkeypatch):
    np.save(tmp_path / "p.npy", np.ones((1, 3)))
    monkeypatch.setattr("greenroom.engine.loader.offload_experts", lambda *_, **__: pytest.fail("experts are read"))
    with pytest.raises(ConfigError, match="the profile covers 1 layers of 3 experts, the model has"):
        greenroom.load(folder, device="cpu", policy="static", profile=str(tmp_path / "p.npy"), progress=False)
