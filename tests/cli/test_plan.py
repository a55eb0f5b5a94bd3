"""``greenroom plan``: output, exit codes, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch

from greenroom.bench import machine
from greenroom.bench.shapes import shape_config
from greenroom.cli.main import app
from greenroom.engine import loader
from greenroom.engine.speed import Rates

LANES = ["--cpu-bandwidth", "76", "--pcie-bandwidth", "49"]
BIG = ["--vram", "80GiB", "--ram", "120GiB", *LANES]


@pytest.fixture(scope="module")
def q30(tmp_path_factory) -> str:
    """A folder with nothing but a configuration."""
    folder = tmp_path_factory.mktemp("q30")
    shape_config("q30-12L").save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "machine_rates", lambda *_, **__: pytest.fail("measured"))


def run(runner, *arguments):
    return runner.invoke(app, ["plan", *arguments])


def test_kv_blocks_in_host_memory_count(runner, q30):
    fits = run(runner, q30, *BIG, "--kv-offload", "16GiB", "--json")
    assert json.loads(fits.stdout)["host_bytes"]["kv_offload"] == 16 << 30
    too_much = run(runner, q30, *BIG, "--kv-offload", "110GiB")
    assert too_much.exit_code == 1
    assert "KV blocks 110.00 GiB and 120.00 GiB are available; give --kv-offload less" in too_much.stderr
    assert run(runner, q30, *BIG, "--kv-offload", "much").exit_code == 2


def test_json(runner, q30):
    result = run(runner, q30, *BIG, "--concurrency", "16", "--context", "1000", "--cache-expert-num", "8", "--json")
    assert result.exit_code == 0
    assert result.stderr == ""
    data = json.loads(result.stdout)
    assert data["fits"] is True
    assert data["problem"] is None
    assert (data["device"], data["cache_expert_num"], data["concurrency"], data["context"]) == ("cuda", 8, 16, 1000)
    assert (data["expert_layers"], data["experts"], data["top_k"], data["expert_bytes"]) == (12, 128, 8, 9437184)
    for place in ("device_bytes", "host_bytes"):
        parts = dict(data[place])
        total, available = parts.pop("total"), parts.pop("available")
        assert sum(parts.values()) == total < available
    assert data["kv_bytes_per_sequence"] == 1000 * 12 * 2048
    assert data["device_bytes"]["kv_cache"] == (16 * 63 + 1) * 16 * 12 * 2048, "blocks of 16 tokens"
    assert data["hit_rate_from"] == "assumed for 6% of the experts cached"
    assert data["rates"]["source"] == "CPU, PCIe given, the rest assumed"
    assert data["decode_all_tok_s"] > data["decode_tok_s"] > 0


def test_every_field_is_documented(runner, q30):
    fields = json.loads(run(runner, q30, *BIG, "--json").stdout)
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    assert [name for name in fields if f"`{name}`" not in text] == []
    for place in ("device_bytes", "host_bytes", "rates"):
        assert [name for name in fields[place] if f"`{name}`" not in text] == []


def test_table(runner, q30):
    result = run(runner, q30, *BIG, "--weights-offload-group-size", "4")
    assert result.exit_code == 0
    for text in (
        "12 layers of 128 experts",
        "GPU: expert cache",
        "host: offloaded weights",
        "decode",
        "prefill",
        "yes",
    ):
        assert text in " ".join(result.stdout.split())


def test_what_does_not_fit_ends_with_1(runner, q30):
    result = run(runner, q30, "--vram", "3GiB", "--ram", "120GiB", *LANES, "--concurrency", "64", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["fits"] is False
    assert data["problem"] in result.stderr
    assert "give less context or concurrency" in data["problem"]
    result = run(runner, q30, "--device", "cpu", "--ram", "4GiB", "--cpu-bandwidth", "20")
    assert result.exit_code == 1
    assert "not enough host memory: the weights, KV cache and activations need" in result.stderr


def test_a_machine_without_a_gpu(runner, q30):
    data = json.loads(run(runner, q30, "--ram", "64GiB", "--cpu-bandwidth", "20", "--json").stdout)
    assert data["device"] == "cpu"
    assert data["rates"]["pcie_gb_s"] is None
    assert data["device_bytes"] == {"total": 0, "available": 0}


def test_measured_rates(runner, q30, monkeypatch):
    calls = []
    rates = Rates(20, 1, None, 10, 2, "measured")
    monkeypatch.setattr(machine, "machine_rates", lambda *a, **k: calls.append((a, k)) or rates)
    data = json.loads(run(runner, q30, "--ram", "64GiB", "--context-num-threads", "3", "--json").stdout)
    assert data["rates"]["source"] == "measured"
    assert calls == [((False, 3), {"again": False})]
    run(runner, q30, "--ram", "64GiB", "--measure")
    assert calls[1][1] == {"again": True}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "cpu", "--vram", "8GiB"], "are of a GPU; leave them out with --device cpu"),
        (["--pcie-bandwidth", "20"], "there is none; give --vram as well"),
        (["--device", "cuda"], "device 'cuda' is not there"),
        ([*BIG, "--hit-rate", "2"], "the hit rate is a share from 0 to 1"),
        ([*BIG, "--context", "50000"], "the model's context is 40960 tokens"),
        ([*BIG, "--concurrency", "0"], "concurrency must be at least 1"),
        (["--vram", "much"], "'much' is not a size"),
        ([*BIG, "--weights-offload-params", "x"], "no effect without offloaded weights"),
        ([*BIG, "--weights-offload-group-size", "50"], "no layer is offloaded"),
        (
            ["--vram", "80GiB", "--cpu-bandwidth", "-1", "--pcie-bandwidth", "2"],
            "--cpu-bandwidth must be a finite number",
        ),
        (["--vram", "80GiB", "--cpu-bandwidth", "8e10", "--pcie-bandwidth", "2"], "cpu_gb_s is in GB/s, like 80"),
    ],
)
def test_refused(runner, q30, arguments, sentence):
    result = run(runner, q30, *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stdout == ""


def test_an_id_downloads_the_configuration_alone(runner, q30, monkeypatch):
    wanted = []
    monkeypatch.setattr(
        loader, "snapshot_download", lambda name, allow_patterns: wanted.append((name, allow_patterns)) or q30
    )
    assert run(runner, "somebody/model", *BIG).exit_code == 0
    assert wanted == [("somebody/model", ["config.json"])]


def test_the_context_is_the_models_where_that_is_short(runner, tmp_path):
    config = shape_config("small")
    config.max_position_embeddings = 100
    config.save_pretrained(tmp_path)
    data = json.loads(run(runner, str(tmp_path), *BIG, "--json").stdout)
    assert data["context"] == 100


@pytest.mark.parametrize("rate", ["0", "-1", "inf", "nan"])
@pytest.mark.parametrize("lane", ["cpu", "pcie", "gpu"])
def test_impossible_bandwidths_are_refused_by_the_names_of_their_flags(runner, q30, lane, rate):
    result = run(runner, q30, "--vram", "80GiB", f"--{lane}-bandwidth", rate)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"--{lane}-bandwidth must be a finite number" in result.stderr


def test_no_line_is_wrapped_in_a_pipe(runner, q30):
    lines = run(runner, q30, *BIG).stdout.splitlines()
    assert all(line[0] != " " or line.startswith(("  GPU: ", "  host: ")) for line in lines), lines
    assert any("128 experts, 8 a token, 9.0 MiB each" in line for line in lines)
