"""A random checkpoint: a model that stock transformers reads, written once, and never over anything else."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import greenroom
from greenroom.bench import random_checkpoint
from greenroom.bench.random_checkpoint import write_checkpoint
from greenroom.bench.shapes import shape_config
from greenroom.engine.safetensors_header import read_header
from greenroom.errors import ConfigError

CONFIG = shape_config("small")
EXPERTS = 2 * 16 * 3 * 128 * 64
"""Values: layers, experts, matrices, their sides."""


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(CONFIG, tmp_path, "small")
    return tmp_path


def model_bytes() -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    return sum(parameter.nbytes for parameter in model.parameters())


def test_bytes_are_the_model_s(tmp_path):
    total = write_checkpoint(CONFIG, tmp_path, "small")
    entries = [entry for file in tmp_path.glob("*.safetensors") for entry in read_header(file).values()]
    assert total == sum(entry.nbytes for entry in entries) == model_bytes()
    experts = [entry for entry in entries if ".experts." in entry.name]
    assert len(experts) == 2 * 16 * 3
    assert sum(entry.nbytes for entry in experts) == EXPERTS * 2


@torch.no_grad()
@pytest.mark.parametrize("shard_bytes", [None, 300_000])
def test_greenroom_and_stock_transformers_read_the_same_model(tmp_path, monkeypatch, shard_bytes):
    if shard_bytes:
        monkeypatch.setattr(random_checkpoint, "_SHARD_BYTES", shard_bytes)
        monkeypatch.setattr(random_checkpoint, "_CHUNK_VALUES", 1000)  # no matrix is a multiple of it
    write_checkpoint(CONFIG, tmp_path, "small")
    if shard_bytes:
        sizes = [sum(e.nbytes for e in read_header(file).values()) for file in tmp_path.glob("*.safetensors")]
        assert len(sizes) > 5
        assert max(sizes) <= shard_bytes
    stock, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert stock.dtype == torch.bfloat16
    model, tokenizer = greenroom.load(tmp_path, progress=False, device="cpu", cache_expert_num=0)
    try:
        ids = tokenizer("A prompt of some bytes.", return_tensors="pt").input_ids
        assert tokenizer.decode(ids[0]) == "A prompt of some bytes."
        expected = stock(ids).logits.float()
        assert expected.std() > 0.05, "a model whose logits are all alike checks nothing"
        assert (model(ids).logits.float() - expected).norm() / expected.norm() < 0.02
        assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, ids.shape[1] + 4)
    finally:
        greenroom.close(model)


def test_weights_are_random(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert 0.019 < model.model.layers[1].mlp.experts.down_proj.float().std() < 0.021
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    assert len({bytes(expert.detach().view(torch.uint8).numpy()) for expert in experts}) == len(experts)
    assert (model.model.norm.weight == 1).all()


def stamps(folder):
    return {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}


def test_a_complete_checkpoint_is_used_again(folder):
    before = stamps(folder)
    assert write_checkpoint(CONFIG, folder, "small") == model_bytes()
    assert stamps(folder) == before


@pytest.mark.parametrize("lost", ["model.safetensors.index.json", "model-00001-of-00001.safetensors"])
def test_one_that_was_cut_short_is_written_again(folder, lost):
    (folder / lost).unlink()
    write_checkpoint(CONFIG, folder, "small")
    model, _ = greenroom.load(folder, progress=False, device="cpu")
    greenroom.close(model)


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "letter.txt").write_text("Dear")
    with pytest.raises(ConfigError, match="holds something else than a small checkpoint"):
        write_checkpoint(CONFIG, tmp_path, "small")
    assert [file.name for file in tmp_path.iterdir()] == ["letter.txt"]


def test_another_shape_s_checkpoint_is_left_alone(folder):
    before = stamps(folder)
    with pytest.raises(ConfigError, match="something else"):
        write_checkpoint(shape_config("q30-12L"), folder, "q30-12L")
    assert stamps(folder) == before


def test_a_disk_that_is_too_small_is_found_first(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * 10**9))
    with pytest.raises(ConfigError, match=r"needs 16\.\d GB on the disk, and .* has 3\.0 GB free"):
        write_checkpoint(shape_config("q30-12L"), tmp_path / "new", "q30-12L")
    assert not list((tmp_path / "new").iterdir())


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        write_checkpoint(CONFIG, tmp_path / "file" / "folder", "small")
