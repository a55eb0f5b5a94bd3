"""Rates are measured once a machine; what is not there is assumed and says so."""

import json

import pytest
import torch

from greenroom.bench import machine
from greenroom.bench.machine import assume_gpu, given_rates, machine_rates
from greenroom.engine.speed import Rates

MEASURED = Rates(20, 1, None, 10, 2, "measured")


@pytest.fixture
def measured(monkeypatch):
    """How often something was measured; a machine without a GPU."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "_measure", lambda on_gpu, threads: calls.append((on_gpu, threads)) or MEASURED)
    return calls


def test_measured_once(measured, tmp_path):
    file = tmp_path / "new" / "rates.json"
    assert machine_rates(False, file=file) == MEASURED
    assert machine_rates(False, file=file) == MEASURED
    assert measured == [(False, None)]
    assert machine_rates(False, file=file, again=True) == MEASURED
    assert len(measured) == 2
    machine_rates(False, threads=1, file=file)
    assert measured[2:] == [(False, 1)]
    assert len(json.loads(file.read_text())) == 2
    assert [path.name for path in file.parent.iterdir()] == ["rates.json"]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 3}', '{"a": {"cpu_gb_s": 1}}', '{"a": {"no": 1}}'])
def test_a_file_that_is_not_ours_is_measured_over(measured, tmp_path, content):
    file = tmp_path / "rates.json"
    file.write_text(content)
    assert machine_rates(False, file=file) == MEASURED
    assert len(measured) == 1
    assert machine_rates(False, file=file) == MEASURED
    assert len(measured) == 1


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(measured, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    file = tmp_path / "file" / "rates.json"
    assert machine_rates(False, file=file) == MEASURED
    assert "not kept for the next time" in caplog.text


def test_a_gpu_that_is_not_there_is_assumed(measured, tmp_path):
    rates = machine_rates(True, file=tmp_path / "rates.json")
    assert rates == assume_gpu(MEASURED)
    assert (rates.cpu_gb_s, rates.pcie_gb_s) == (20, machine.ASSUMED_PCIE_GB_S)
    assert rates.source == "CPU measured, GPU assumed"


def test_given():
    assert given_rates(100, None).pcie_gb_s is None
    rates = given_rates(100, 50)
    assert (rates.cpu_gb_s, rates.pcie_gb_s, rates.cpu_tflop_s) == (100, 50, 4.5)


def test_measuring(tmp_path, monkeypatch):
    """For real, with small layers: positive rates of this machine."""
    from greenroom.bench import bandwidth

    monkeypatch.setattr(bandwidth, "_EXPERTS", 16)
    rates = machine_rates(torch.cuda.is_available(), file=tmp_path / "rates.json")
    assert rates.source == "measured"
    assert (rates.pcie_gb_s is not None) == torch.cuda.is_available()
    assert rates.dense_gb_s > 0.1
    assert rates.cpu_gb_s > 0.1
