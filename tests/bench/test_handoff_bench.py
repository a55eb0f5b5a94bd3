"""The handoff benchmark: its layers run where it says, and its figures fit together."""

import json
import math

import pytest
import torch

from greenroom.bench.handoff import bench_handoff
from greenroom.errors import ConfigError
from tests.reference.native_threads import engine_tasks_left

pytest.importorskip("triton")


def test_figures_fit_together():
    result = bench_handoff(batch=2, layers=2, threads=1, repeats=2, steps=2)
    fields = json.loads(json.dumps(result.to_dict()))
    assert (fields["bench"], fields["unit"], fields["batch"]) == ("handoff", "us/layer", 2)
    assert (fields["threads"], fields["tokens"], fields["repeats"]) == (1, 2, 2)
    for name in ("value", "handed_over_us", "resident_us", "busy_ns"):
        assert math.isfinite(fields[name])
    assert result.value == pytest.approx(result.handed_over_us - result.resident_us)
    assert result.resident_us > 0
    # The CPU's part is inside the layer's time.
    assert 0 < result.busy_ns / 1e3 < result.handed_over_us
    assert result.graph == torch.cuda.is_available()
    assert (result.gpu is None) == (not torch.cuda.is_available())
    assert engine_tasks_left(0) == 0


@pytest.mark.cuda
def test_a_handoff_on_a_gpu_costs_microseconds():
    result = bench_handoff(layers=12, repeats=5, steps=20)
    assert result.graph
    assert 0 < result.value < 200


@pytest.mark.parametrize("arguments", [{"batch": 0}, {"batch": 33}, {"layers": 0}, {"steps": 0}])
def test_numbers_out_of_range(arguments):
    with pytest.raises(ConfigError, match=f"{next(iter(arguments))} must be 1 to"):
        bench_handoff(**arguments)


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="needs a GPU"):
        bench_handoff()
