"""Reading the machine, from files that the tests write."""

import os

import pytest

from greenroom import hardware


@pytest.fixture
def fake(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\n")
    return tmp_path


def test_available_memory_without_a_container(fake):
    assert hardware.available_host_bytes(proc=fake, cgroup=fake) == 600 * 1024


def test_a_container_limit_counts_page_cache_as_free(fake):
    (fake / "memory.max").write_text("400000\n")
    (fake / "memory.current").write_text("300000\n")
    (fake / "memory.stat").write_text("anon 100000\nfile 150000\n")
    assert hardware.available_host_bytes(proc=fake, cgroup=fake) == 250000


def test_no_limit_is_written_as_max(fake):
    (fake / "memory.max").write_text("max\n")
    (fake / "memory.current").write_text("300000\n")
    assert hardware.available_host_bytes(proc=fake, cgroup=fake) == 600 * 1024


def test_cores_follow_affinity_and_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 1, 5, 7})
    assert hardware.usable_cores(tmp_path) == [1, 3, 5, 7]
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert hardware.usable_cores(tmp_path) == [1, 3]
    assert not hardware.may_pin(tmp_path)
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert hardware.usable_cores(tmp_path) == [1, 3, 5, 7]
    assert hardware.may_pin(tmp_path)
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert hardware.usable_cores(tmp_path) == [1]
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert hardware.usable_cores(tmp_path) == [1, 3, 5, 7]


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
