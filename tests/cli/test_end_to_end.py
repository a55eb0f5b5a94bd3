"""The commands over the real thing: models on disk, loaded, run and refused."""

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from greenroom import hardware
from greenroom.cli.main import app
from tests.reference.families import make_model
from tests.reference.tokenizer import VOCAB, make_tokenizer

TINY_MOE = Path(__file__).parent.parent.parent / "examples" / "tiny-moe"
COMMAND = [sys.executable, "-m", "greenroom"]
PROMPT = "In the beginning"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """A random Qwen3-MoE in two shards, with a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "qwen3_moe"
    model = make_model("qwen3_moe")
    model.resize_token_embeddings(VOCAB, mean_resizing=False)
    model.save_pretrained(folder, max_shard_size="300KB")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(pristine, tmp_path) -> Path:
    """A copy to damage."""
    return shutil.copytree(pristine, tmp_path / "model")


def generate(runner, model, *flags):
    return runner.invoke(app, ["generate", str(model), "--prompt", PROMPT, "--max-tokens", "12", *flags, "--json"])


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    assert len(found) > 1
    return found


def test_tokens_are_those_of_the_stock_model_whatever_is_cached(runner, pristine):
    stock = make_model("qwen3_moe")
    stock.resize_token_embeddings(VOCAB, mean_resizing=False)
    stock = type(stock).from_pretrained(pristine, dtype="auto")
    ids = torch.tensor([make_tokenizer()(PROMPT)["input_ids"]])
    expected = stock.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    for flags in ([], ["--cache-expert-num", "2"], ["--cache-expert-num", "100", "--policy", "lru"]):
        result = generate(runner, pristine, *flags)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["token_ids"] == expected
        assert result.stderr == ""


def test_counters_add_up(runner, pristine):
    value = json.loads(generate(runner, pristine, "--cache-expert-num", "2", "--context-num-threads", "1").stdout)
    assert value["misses"] == value["cpu"] + value["streamed"] > 0
    assert value["copies"] == value["admissions"] + value["streamed"] > 0
    assert value["threads"] == 1
    for name in ("hits", "misses", "copies", "cpu", "evictions"):
        assert sum(layer[name] for layer in value["layers"]) == value[name]


def test_chat(runner, pristine):
    result = runner.invoke(app, ["chat", str(pristine), "--max-tokens", "4"], input="hello\nmore\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("\n")
    assert result.stderr == ""


def test_as_a_process(pristine):
    arguments = [*COMMAND, "generate", str(pristine), "--prompt", PROMPT, "--max-tokens", "4"]
    plain = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    pure = subprocess.run([*arguments, "--json"], capture_output=True, text=True, timeout=120)
    assert (plain.returncode, pure.returncode) == (0, 0), plain.stderr + pure.stderr
    assert pure.stderr == ""
    assert plain.stdout == json.loads(pure.stdout)["text"] + "\n"
    assert "tok/s" in plain.stderr


def assert_refused(result, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("greenroom: ")
    assert result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr


def test_no_such_folder(runner, tmp_path):
    assert_refused(generate(runner, tmp_path / "nowhere"), "nowhere")


def test_an_empty_folder(runner, tmp_path):
    assert_refused(generate(runner, tmp_path), str(tmp_path))


def test_not_a_mixture_of_experts(runner, tmp_path):
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    assert_refused(generate(runner, tmp_path), "Llama", "no routed experts")


def test_a_missing_shard(runner, checkpoint):
    shards(checkpoint)[-1].unlink()
    assert_refused(generate(runner, checkpoint), "model-0000", "missing")


def test_a_truncated_shard(runner, checkpoint):
    shard = shards(checkpoint)[-1]
    shard.write_bytes(shard.read_bytes()[:-100])
    assert_refused(generate(runner, checkpoint), shard.name, "truncated", "tensor")


def test_a_corrupt_header(runner, checkpoint):
    shard = shards(checkpoint)[0]
    content = shard.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    shard.write_bytes(content[:8] + b"\xff" * size + content[8 + size :])
    assert_refused(generate(runner, checkpoint), shard.name, "corrupt")


@pytest.mark.parametrize("part", ["experts", "norm"])
def test_a_tensor_of_the_wrong_shape(runner, checkpoint, part):
    for shard in shards(checkpoint):
        tensors = load_file(shard)
        name = next((name for name in tensors if f".{part}." in name), None)
        if name is not None:
            tensors[name] = tensors[name][:-1].clone()
            save_file(tensors, shard, metadata={"format": "pt"})
            break
    assert name is not None
    assert_refused(generate(runner, checkpoint), name)


def test_another_format(runner, checkpoint):
    for path in checkpoint.glob("*.safetensors*"):
        path.unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(b"\0")
    assert_refused(generate(runner, checkpoint), "safetensors", "pytorch_model.bin")


def test_a_quantised_checkpoint(runner, checkpoint):
    path = checkpoint / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps(config))
    assert_refused(generate(runner, checkpoint), "fp8")


def test_too_little_host_memory(runner, pristine, monkeypatch):
    monkeypatch.setattr(hardware, "available_host_bytes", lambda: 1000)
    assert_refused(generate(runner, pristine), "host memory", "need")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--policy", "mru"], ["mru", "lfru"]),
        (["--isa", "sse2"], ["sse2", "avx2"]),
        (["--device", "cuda:99"], ["cuda:99"]),
        (["--policy", "lru", "--profile", "x.npy"], ["static"]),
        (["--policy", "static", "--profile", "x.npy"], ["x.npy"]),
        (["--cache-expert-num", "-1"], ["cache_expert_num"]),
    ],
)
def test_unknown_names(runner, pristine, flags, words):
    assert_refused(generate(runner, pristine, *flags), *words)


class TestTinyMoe:
    """The trained example: English, and the same English however it is offloaded."""

    def test_it_is_there(self):
        assert (TINY_MOE / "config.json").is_file()
        assert sum(path.stat().st_size for path in TINY_MOE.iterdir()) <= 16 << 20

    def test_its_tokens_do_not_depend_on_offloading(self, runner):
        choices = [["--cache-expert-num", str(slots)] for slots in (0, 1, 4, 1000)]
        choices += [["--cache-expert-num", "4", "--policy", name] for name in ("lru", "lfu", "lfru", "first-come")]
        choices += [["--cache-expert-num", "4", "--context-num-threads", str(threads)] for threads in (1, 2)]
        results = [json.loads(generate(runner, TINY_MOE, *flags).stdout) for flags in choices]
        assert len({tuple(value["token_ids"]) for value in results}) == 1
        assert len(results[0]["token_ids"]) == 12
        assert results[0]["hits"] == 0
        assert results[3]["evictions"] == 0

    def test_a_profile_of_one_run_serves_the_next(self, runner, tmp_path):
        path = tmp_path / "profile"
        recorded = generate(runner, TINY_MOE, "--save-profile", str(path))
        assert recorded.exit_code == 0
        profile = np.load(path)
        assert profile.shape == (8, 32)
        # Of each pass (a prompt and eleven tokens) every token chooses four experts a layer.
        np.testing.assert_allclose(profile.sum(axis=1), 12 * 4)
        knobs = "--policy", "static", "--profile", str(path), "--cache-expert-num", "8"
        kept = json.loads(generate(runner, TINY_MOE, *knobs).stdout)
        assert kept["token_ids"] == json.loads(recorded.stdout)["token_ids"]
        assert kept["hits"] > 0
        other = generate(runner, TINY_MOE, "--save-profile", str(tmp_path / "nowhere" / "p"))
        assert other.exit_code != 0
        assert "give a file in a folder that exists" in other.output + other.stderr

    def test_it_speaks_english(self, runner):
        result = runner.invoke(app, ["generate", str(TINY_MOE), "--prompt", PROMPT, "--max-tokens", "60", "--json"])
        words = json.loads(result.stdout)["text"].lower().split()
        assert len(words) >= 10
        assert {"the", "of", "and", "a", "to", "in", "that"} & set(words)

    def test_it_chats(self, runner):
        result = runner.invoke(app, ["chat", str(TINY_MOE), "--max-tokens", "16"], input="Who are you?\n")
        assert result.exit_code == 0, result.output
        assert result.stdout.strip()
