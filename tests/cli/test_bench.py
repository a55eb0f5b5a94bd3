"""greenroom bench: flags reach the benchmarks, their results reach the user."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from greenroom.bench import commit
from greenroom.bench.commit import commit_hash
from greenroom.cli.main import app
from greenroom.errors import ConfigError

RESULT = {
    "isa": "avx2",
    "threads": 2,
    "us": 1234.5,
    "gb_s": 56.7,
    "tflop_s": 0.089,
    "max_error": 1e-3,
    "torch_us": 3703.5,
    "torch_error": 2e-3,
    "speedup": 3.0,
}


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, object]]:
    calls: list[dict[str, object]] = []

    def run_expert_benchmark(**arguments):
        calls.append(arguments)
        return SimpleNamespace(to_dict=lambda: dict(RESULT))

    module = ModuleType("greenroom.bench.experts")
    module.run_expert_benchmark = run_expert_benchmark
    monkeypatch.setitem(sys.modules, "greenroom.bench.experts", module)
    return calls


def test_json(runner, calls):
    result = runner.invoke(app, ["bench", "experts", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == RESULT
    assert calls == [
        {"hidden": 2048, "inter": 768, "experts": 128, "topk": 8, "tokens": 1, "threads": None, "isa": "auto"}
    ]


def test_flags_and_table(runner, calls):
    flags = "--hidden 64 --inter 32 --experts 4 --topk 2 --tokens 3 --threads 1 --isa portable"
    result = runner.invoke(app, ["bench", "experts", *flags.split()])
    assert result.exit_code == 0, result.output
    assert calls == [{"hidden": 64, "inter": 32, "experts": 4, "topk": 2, "tokens": 3, "threads": 1, "isa": "portable"}]
    for word in ("2 of 4 experts", "avx2, 2 threads", "56.7 GB/s", "3.00x"):
        assert word in result.stdout


@pytest.mark.parametrize("flags", ["--hidden 0", "--tokens -1", "--threads 0", "--experts 4 --topk 5"])
def test_wrong_values(runner, calls, flags):
    result = runner.invoke(app, ["bench", "experts", *flags.split()])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert not calls


@pytest.fixture
def fake_bench(monkeypatch):
    """fake_bench(module, function, result) replaces a benchmark and gives the list of its calls."""

    def replace(name: str, function: str, result):
        calls = []

        def run(*arguments, **named):
            calls.append((arguments, named))
            return result

        module = ModuleType(f"greenroom.bench.{name}")
        setattr(module, function, run)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return calls

    return replace


def result_of(**fields) -> SimpleNamespace:
    return SimpleNamespace(to_dict=lambda: dict(fields))


def test_handoff(runner, fake_bench):
    calls = fake_bench("handoff", "bench_handoff", result_of(value=7.5, unit="us/layer", bound=None))
    flags = "--batch 4 --layers 12 --context-num-threads 3 --isa avx2"
    result = runner.invoke(app, ["bench", "handoff", *flags.split(), "--json"])
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert fields == {"value": 7.5, "unit": "us/layer", "bound": None}
    runner.invoke(app, ["bench", "handoff"])
    assert calls == [((4, 12, 3, "avx2"), {}), ((1, 48, None, "auto"), {})]


def test_load(runner, fake_bench):
    calls = fake_bench("load", "bench_load", result_of(value=2.5, load_seconds=[1.0, 2.0]))
    result = runner.invoke(app, ["bench", "load", "--shape", "small", "--folder", "here", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "2.5" in result.stdout
    assert "1, 2" in result.stdout
    assert json.loads(runner.invoke(app, ["bench", "load", "--json"]).stdout)["value"] == 2.5
    assert calls == [
        (("small", Path("here"), "cpu"), {"progress": True}),
        (("q30-12L", None, "auto"), {"progress": False}),
    ]


def test_kernels_print_a_line_each(runner, fake_bench):
    full = {"kernel": "up", "tokens": 1, "shape": "8 experts", "value": 20.0, "gb_s": 2500.0, "limit": "hbm"}
    rows = [
        full | {"share": 0.9, "limit_gb_s": 2800.0},
        full | {"kernel": "combine", "share": None, "gb_s": None, "limit_gb_s": None},
    ]
    fake_bench("kernels", "bench_kernels", iter([result_of(**row) for row in rows]))
    result = runner.invoke(app, ["bench", "kernels", "--json"])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines == rows
    fake_bench("kernels", "bench_kernels", iter([result_of(**row) for row in rows]))
    table = runner.invoke(app, ["bench", "kernels"]).stdout
    for words in ("up, 1 x 8 experts", "20.0 us, 2,500 GB/s, 90% of 2,800 GB/s (hbm)", "combine"):
        assert words in table


TRANSFER = {"way": "staged", "run_bytes": 16384, "value": 50.0, "store_gb_s": 49.0} | {
    "load_gb_s_together": 40.0,
    "store_gb_s_together": 39.0,
}


@pytest.mark.parametrize(("part", "lines"), [("all", 3), ("blocks", 2), ("prefix", 1)])
def test_kv(runner, fake_bench, part, lines):
    rows = [SimpleNamespace(**row, to_dict=lambda row=row: row) for row in (TRANSFER, TRANSFER | {"way": "kernel"})]
    transfers = fake_bench("kv", "bench_kv", iter(rows))
    prefixes = fake_bench("kv_prefix", "bench_kv_prefix", result_of(value=12.5, speedup=16.0))
    flags = ["bench", "kv", "--part", part, "--shape", "small", "--tokens", "99", "--device", "cpu"]
    result = runner.invoke(app, [*flags, "--json"])
    assert result.exit_code == 0, result.output
    printed = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(printed) == lines
    assert (TRANSFER in printed) == (part != "prefix")
    assert transfers == ([(("cpu",), {})] if part != "prefix" else [])
    assert [arguments[:2] for arguments, _ in prefixes] == ([("small", 99)] if part != "blocks" else [])


def test_kv_as_a_table(runner, fake_bench):
    fake_bench("kv", "bench_kv", iter([SimpleNamespace(**TRANSFER)]))
    fake_bench("kv_prefix", "bench_kv_prefix", result_of(value=12.5, speedup=16.0))
    table = runner.invoke(app, ["bench", "kv"]).stdout
    for words in ("staged, 16 KiB", "50.0 GB/s load, 49.0 store; together 40.0 and 39.0", "12.5"):
        assert words in table
    refused = runner.invoke(app, ["bench", "kv", "--part", "some"])
    assert refused.exit_code == 2
    assert "blocks, prefix or all" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "graph", "dbo"), [([], True, None), (["--eager"], False, None), (["--dbo", "auto"], True, "auto")]
)
def test_ways_of_decode(runner, fake_bench, flags, graph, dbo):
    calls = fake_bench("model", "bench_decode", iter([result_of(value=1.0)]))
    result = runner.invoke(app, ["bench", "decode", *flags, "--json"])
    assert result.exit_code == 0, result.output
    assert calls[0][1] == {"graph": graph, "dbo": dbo}


@pytest.mark.parametrize(
    ("command", "function", "values"),
    [
        ("decode", "bench_decode", {"default": [1], "--batch 1 --batch 16": [1, 16]}),
        ("prefill", "bench_prefill", {"default": [512], "--tokens 512 --tokens 3900": [512, 3900]}),
    ],
)
def test_several_values_of_one_model(runner, fake_bench, command, function, values):
    for flags, expected in values.items():
        rows = [{"value": float(number)} for number in expected]
        given = [] if flags == "default" else flags.split()
        calls = fake_bench("model", function, iter([result_of(**row) for row in rows]))
        result = runner.invoke(app, ["bench", command, *given, "--json"])
        assert result.exit_code == 0, result.output
        assert [json.loads(line) for line in result.stdout.splitlines()] == rows
        assert expected in calls[0][0]
        fake_bench("model", function, iter([result_of(**row) for row in rows]))
        blocks = runner.invoke(app, ["bench", command, *given]).stdout.split("\n\n")
        assert [block.split() for block in blocks] == [["value", f"{number:,}"] for number in expected]


def test_a_result_is_printed_before_the_next_is_measured(runner, fake_bench):
    def results():
        yield result_of(value=1.0)
        raise ConfigError("no second one")

    fake_bench("model", "bench_decode", results())
    result = runner.invoke(app, ["bench", "decode", "--batch", "1", "--batch", "2", "--json"])
    assert result.exit_code == 2
    assert [json.loads(line) for line in result.stdout.splitlines()] == [{"value": 1.0}]
    assert "no second one" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        "handoff --batch 0",
        "handoff --batch 33",
        "decode --shape small --dbo maybe",
        "decode --shape small --dbo off --eager",
        "decode --shape small --dbo off --batch 33",
        "decode --shape small --dbo on --device cpu",
        "decode --shape small --dbo on --batch 1",
        "decode --shape small --batch 1 --batch 0",
        "decode --shape small --dbo off --batch 1 --batch 33",
        "prefill --shape small --tokens 8 --tokens 0",
        "handoff --layers 0",
        "handoff --context-num-threads 0",
        "handoff --isa mmx",
        "load --shape huge",
        "load --shape small --device tpu",
        "load --shape small --device cuda:99",
    ],
)
def test_values_that_the_benchmarks_refuse(runner, command):
    result = runner.invoke(app, ["bench", *command.split(), "--json"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_a_checkout_which_tracks_the_package(tmp_path):
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    assert commit_hash(package) is None
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "another project, in which the package is installed")
    assert commit_hash(package) is None
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "the package itself")
    found = commit_hash(package)
    assert re.fullmatch("[0-9a-f]{7,}", found)
    assert git(tmp_path, "rev-parse", "HEAD").startswith(found)
    (tmp_path / "elsewhere.txt").write_text("not of the package")
    assert commit_hash(package) == found
    (package / "new.py").write_text("")
    assert commit_hash(package) == found + "+"


def test_without_git_there_is_no_commit(monkeypatch):
    def no_git(*arguments, **named):
        raise FileNotFoundError("git")

    monkeypatch.setattr(commit.subprocess, "run", no_git)
    assert commit_hash() is None
