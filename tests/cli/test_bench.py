"""greenroom bench experts: flags reach the benchmark, its result reaches the user."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from greenroom.cli.main import app

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
