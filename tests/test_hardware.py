"""What this machine has, as far as control groups leave it."""

import os

import pytest

from greenroom import hardware


@pytest.mark.parametrize(("free", "available"), [(None, 600), (700, 600), (250, 250), (-9, 0)])
def test_available_memory_is_the_kernels_and_what_groups_leave(tmp_path, monkeypatch, free, available):
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\n")
    monkeypatch.setattr(hardware.cgroups, "free_memory", lambda *_: None if free is None else free * 1024)
    assert hardware.available_host_bytes(tmp_path, tmp_path) == available * 1024


@pytest.mark.parametrize(
    ("quota", "cores", "pinned"),
    [(None, [1, 3, 5, 7], True), (2.5, [1, 3], False), (4.0, [1, 3, 5, 7], True), (0.5, [1], False)],
)
def test_cores_follow_affinity_and_quota(monkeypatch, quota, cores, pinned):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 1, 5, 7})
    monkeypatch.setattr(hardware.cgroups, "cpu_quota", lambda: quota)
    assert hardware.usable_cores() == cores
    assert hardware.may_pin() is pinned


def test_one_core_is_left_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "usable_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(hardware, "may_pin", lambda: True)
    assert hardware.engine_cores(None, beside_gpu=True) == (3, [1, 2, 3])
    assert hardware.engine_cores(None, beside_gpu=False) == (4, [0, 1, 2, 3])
    assert hardware.engine_cores(2, beside_gpu=True) == (2, [2, 3])
    assert hardware.engine_cores(9, beside_gpu=True) == (9, None)
    monkeypatch.setattr(hardware, "usable_cores", lambda: [0])
    assert hardware.engine_cores(None, beside_gpu=True) == (1, [0])
    monkeypatch.setattr(hardware, "may_pin", lambda: False)
    assert hardware.engine_cores(None, beside_gpu=True) == (1, None)
