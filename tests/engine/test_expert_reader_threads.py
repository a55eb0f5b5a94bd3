"""The threads that read experts: they say how far they are, and all end, whatever fails."""

import threading
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save_file

from greenroom.engine.checkpoint import Checkpoint
from greenroom.errors import CheckpointError
from tests.engine.expert_reading import (
    STEM,
    E,
    H,
    I,
    loaded,
    make_spec,
    per_expert_tensors,
)


@pytest.mark.parametrize("threads", [1, 2, 7, 1000])
def test_progress_rises_to_the_total(threads, tmp_path):
    save_file(per_expert_tensors(torch.float32), tmp_path / "model.safetensors")
    calls: list[tuple[int, int]] = []
    here = threading.get_ident()

    def progress(done: int, total: int) -> None:
        assert threading.get_ident() == here
        calls.append((done, total))

    with loaded(tmp_path, make_spec(), threads, progress):
        total = 2 * E * 3 * I * H * 4
        assert {shown for _, shown in calls} == {total}
        assert [done for done, _ in calls] == sorted({done for done, _ in calls})
        assert calls[-1][0] == total


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-experts")]


def failing_on(monkeypatch: pytest.MonkeyPatch, bad: str) -> list[str]:
    """Makes the read of ``bad`` fail; returns the names that were read."""
    real: Callable[..., None] = Checkpoint.read_into
    seen: list[str] = []

    def read_into(self, entry, destination, skip=0):
        seen.append(entry.name)
        if entry.name == bad:
            raise CheckpointError(f"{entry.file}: cannot read tensor '{entry.name}' (broken)")
        threading.Event().wait(0.001)
        real(self, entry, destination, skip)

    monkeypatch.setattr(Checkpoint, "read_into", read_into)
    return seen


@pytest.mark.parametrize("threads", [1, 4])
def test_a_failure_stops_every_thread(threads, tmp_path, monkeypatch):
    """At once, however long the caller's progress takes."""
    tensors = per_expert_tensors(torch.bfloat16, layers=40)
    save_file(tensors, tmp_path / "model.safetensors")
    bad = f"{STEM.format(0)}.4.down_proj.weight"
    seen = failing_on(monkeypatch, bad)

    def progress(done: int, total: int) -> None:
        threading.Event().wait(0.05)

    with (
        pytest.raises(CheckpointError, match=rf"model\.safetensors: cannot read tensor '{bad}' \(broken\)"),
        loaded(tmp_path, make_spec(layers=40), threads, progress),
    ):
        pass
    assert not reader_threads()
    assert len(seen) < 50


def test_a_failing_progress_stops_every_thread(tmp_path, monkeypatch):
    tensors = per_expert_tensors(torch.bfloat16, layers=40)
    save_file(tensors, tmp_path / "model.safetensors")
    seen = failing_on(monkeypatch, "")

    def progress(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), loaded(tmp_path, make_spec(layers=40), 4, progress):
        pass
    assert not reader_threads()
    assert len(seen) < len(tensors) // 2


def test_threads_do_not_outlive_a_good_run(tmp_path):
    save_file(per_expert_tensors(torch.bfloat16), tmp_path / "model.safetensors")
    with loaded(tmp_path, make_spec()):
        assert not reader_threads()
