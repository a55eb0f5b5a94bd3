"""The load benchmark: its figures are those of a load, and it leaves nothing behind."""

import json

import pytest

import greenroom
from greenroom.bench import load as bench
from greenroom.bench.load import bench_load
from greenroom.bench.random_checkpoint import write_checkpoint
from greenroom.bench.shapes import shape_config
from greenroom.engine.safetensors_header import read_header


def test_figures_of_a_load(tmp_path):
    result = bench_load("small", tmp_path, "cpu", repeats=2)
    fields = json.loads(json.dumps(result.to_dict()))
    assert (fields["bench"], fields["unit"], fields["device"], fields["gpu"]) == ("load", "GB/s", "cpu", None)
    files = [entry for file in tmp_path.glob("*.safetensors") for entry in read_header(file).values()]
    model_bytes = sum(entry.nbytes for entry in files)
    assert result.checkpoint_bytes == model_bytes
    assert result.host_bytes == sum(entry.nbytes for entry in files if ".experts." in entry.name)
    assert len(result.load_seconds) == 2
    assert result.value == pytest.approx(model_bytes / (sum(result.load_seconds) / 2) / 1e9)
    assert result.base_rss_bytes < result.peak_rss_bytes < 4 << 30
    assert result.peak_over_model == pytest.approx(result.peak_rss_bytes / model_bytes)
    assert (result.page_locked, result.cache_expert_num) == (False, 0)
    assert (tmp_path / "config.json").is_file()


def test_a_temporary_checkpoint_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.tempfile, "tempdir", str(tmp_path))
    seen = []

    def load_in_child(folder, device):
        seen.append(sorted(file.suffix for file in folder.iterdir()))
        raise greenroom.GreenroomError("too little memory")

    monkeypatch.setattr(bench, "_load_in_child", load_in_child)
    with pytest.raises(greenroom.GreenroomError, match="too little memory"):
        bench_load("small", None, "cpu")
    assert ".safetensors" in seen[0]
    assert not list(tmp_path.iterdir())


def test_what_the_process_refuses_is_said(tmp_path):
    write_checkpoint(shape_config("small"), tmp_path, "small")
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(greenroom.GreenroomError, match="has no tokenizer"):
        bench._load_in_child(tmp_path, "cpu")
