"""What results of all benchmarks share: the keys of a line of JSON, and who measured it."""

import dataclasses

import pytest
import torch

from greenroom.bench.bandwidth import Bandwidth
from greenroom.bench.commit import commit_hash
from greenroom.bench.experts import ExpertBenchmark
from greenroom.bench.handoff import HandoffBenchmark
from greenroom.bench.kernels import KernelBenchmark
from greenroom.bench.kv import KvTransferBenchmark
from greenroom.bench.kv_prefix import KvPrefixBenchmark
from greenroom.bench.load import LoadBenchmark
from greenroom.bench.model import ModelBenchmark
from greenroom.bench.result import BenchResult, cpu_name, gpu_name

RESULTS = [
    Bandwidth,
    ExpertBenchmark,
    HandoffBenchmark,
    KernelBenchmark,
    KvPrefixBenchmark,
    KvTransferBenchmark,
    LoadBenchmark,
    ModelBenchmark,
]
SHARED = ["bench", "shape", "value", "unit", "bound", "repeats", "device", "gpu", "cpu"]


@pytest.mark.parametrize("kind", RESULTS)
def test_every_line_has_the_shared_keys(kind):
    names = [field.name for field in dataclasses.fields(kind)]
    filled = kind(**{name: name for name in names})
    line = filled.to_dict()
    assert list(line) == [*names, "commit"]
    assert names[: len(SHARED)] == SHARED, "every line begins alike"
    assert line == {name: name for name in names} | {"commit": commit_hash()}
    with pytest.raises(dataclasses.FrozenInstanceError):
        filled.value = 2.0


def test_what_is_not_there_is_null():
    line = BenchResult(bench="none", value=1.0, unit="s", repeats=3, device="cpu").to_dict()
    assert (line["shape"], line["bound"], line["gpu"]) == (None, None, None)
    assert line["cpu"] == cpu_name()
    assert line["cpu"]


def test_a_cpu_is_no_gpu(monkeypatch):
    assert gpu_name(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert gpu_name(torch.device("cuda", 1)) == "GPU 1"
