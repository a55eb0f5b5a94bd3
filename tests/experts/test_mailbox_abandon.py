"""Mailboxes that are given up while a job of theirs lasts: nobody waits for it, and nothing is freed under it."""

import gc
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from greenroom.errors import EngineError
from greenroom.experts import mailbox
from greenroom.experts.mailbox import Mailboxes
from tests.experts.stage import AGES, SMALL, WIDE, Stage
from tests.reference.posting_device import PostingDevice

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SOON, LIMIT = 0.05, 20.0
"""Seconds: a wait in vain, and one that must not be in vain."""


@contextmanager
def job_that_lasts(stage: Stage, layer: int = 0) -> Iterator[None]:
    """Mailboxes armed, a job of ``layer`` begun, which ends behind the block."""
    stage.engine.throttle(AGES)
    stage.boxes.arm()
    stage.post(layer)
    stage.device.wait_until_begun(layer)
    try:
        yield
    finally:
        stage.engine.throttle(1)


def test_a_job_that_lasts_is_not_waited_for() -> None:
    with Stage([WIDE] * 3) as stage:
        boxes, device = stage.boxes, stage.device
        expected = stage.submitted(0, stage.batch(0, 1, 0))
        with job_that_lasts(stage):
            stage.post(1)
            device.wait_until_begun(1)  # in the queue
            assert not any(device.answered(layer) for layer in range(3))
            started = time.monotonic()
            assert not boxes.abandon(SOON)
            assert time.monotonic() - started < LIMIT / 2
            for layer in range(3):
                device.wait(layer)
            assert boxes.pending() == 0, "the watchdog is told which layer it is"
            assert not boxes.abandon(0)
            assert not any(device.answered(layer) for layer in range(3)), "done was raised once more"
            with pytest.raises(EngineError, match="given up are not armed again"):
                boxes.arm()
        assert boxes.abandon(LIMIT)
        for layer in (0, 1):
            assert device.answered(layer), "jobs that were begun go on to their end"
        assert not device.answered(2)
        assert torch.equal(boxes.out[0][:1], expected)
        assert boxes.pending() is None
        boxes.disarm()
        boxes.close()
        assert stage.engine._mailboxes == []


def test_a_device_that_nobody_answers_goes_on() -> None:
    with Stage([SMALL] * 3) as stage:
        boxes, device = stage.boxes, stage.device
        device.request(2, 1)
        assert boxes.pending() == 2
        assert boxes.abandon(LIMIT)
        assert boxes.pending() is None, "the request was not dropped"
        for layer in range(3):
            device.wait(layer)


def test_armed_mailboxes_are_disarmed() -> None:
    with Stage([SMALL] * 2) as stage:
        other = Mailboxes(stage.engine, stage.store, 4, 3, pin_memory=False)
        other.arm()
        stage.boxes.arm()
        assert stage.boxes.abandon(LIMIT)
        stage.device.wait(0)
        stage.post(0)
        device = PostingDevice(other)
        for _ in range(20):
            device.write(1, *stage.batch(1, 1, 0))
            device.request(1, 1)
            device.wait(1)
        assert stage.device.requested(0), "mailboxes that were given up were served"
        other.disarm()
        time.sleep(0.05)  # workers spin for a moment after a job
        start = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - start < 0.02, "somebody still looks at them"


def test_other_mailboxes_go_on() -> None:
    """Jobs take turns: behind the one that lasts, and then as if nothing had been."""
    with Stage([WIDE] * 2) as stage:
        other = Mailboxes(stage.engine, stage.store, 4, 3, pin_memory=False)
        device, batch = PostingDevice(other), stage.batch(1, 2, 3)
        expected = stage.submitted(1, batch)
        with job_that_lasts(stage):
            assert not stage.boxes.abandon(SOON)
            other.arm()
            device.write(1, *batch)
            device.request(1, 2)
        for _ in range(20):
            assert torch.equal(device.result(1)[:2], expected)
            device.write(1, *batch)
            device.request(1, 2)
        device.wait(1)
        other.close()
        assert stage.boxes.abandon(LIMIT)


def test_who_disarms_waits_and_who_abandons_does_not() -> None:
    with Stage([WIDE]) as stage:
        waiter = threading.Thread(target=stage.boxes.disarm)
        with job_that_lasts(stage):
            waiter.start()
            waiter.join(SOON)
            assert waiter.is_alive(), "disarm did not wait for the job"
            assert not stage.boxes.abandon(SOON)
            stage.device.wait(0)
            waiter.join(SOON)
            assert waiter.is_alive(), "disarm did not wait for the job of mailboxes that were given up"
        waiter.join(LIMIT)
        assert not waiter.is_alive()
        assert stage.device.answered(0)


def test_closing_keeps_what_a_job_uses(monkeypatch, caplog) -> None:
    monkeypatch.setattr(mailbox, "LATE_JOB_S", SOON)
    with Stage([WIDE]) as stage:
        expected = stage.submitted(0, stage.batch(0, 1, 0))
        experts = weakref.ref(stage.store.blocks(0))
        with job_that_lasts(stage):
            assert not stage.boxes.abandon(0)
            with caplog.at_level(logging.WARNING):
                stage.boxes.close()
            assert "job of layer 0 was given up and has not ended within 0.05 s" in caplog.text
            with pytest.raises(EngineError, match="closed"):
                stage.boxes.arm()
            stage.store.close()
            gc.collect()
            assert experts() is not None, "the experts were freed under a job that reads them"
            assert stage.engine._mailboxes == [stage.boxes]
        assert stage.boxes.abandon(LIMIT)
        assert torch.equal(stage.boxes.out[0][:1], expected)
        stage.boxes.close()
        assert experts() is None, "nobody uses the experts any more"
        assert stage.engine._mailboxes == []


def test_closing_waits_for_a_job_that_ends() -> None:
    with Stage([WIDE]) as stage:
        closer = threading.Thread(target=stage.boxes.close)
        with job_that_lasts(stage):
            assert not stage.boxes.abandon(0)
            closer.start()
        closer.join(LIMIT)
        assert not closer.is_alive()
        assert stage.device.answered(0)
        assert stage.engine._mailboxes == []


_NEVER_ENDS = """
import ctypes, gc, sys, time
import torch
from greenroom.experts import mailbox
from greenroom.kernels.cpu.library import load_library
from tests.experts.stage import AGES, WIDE, Stage

mailbox.LATE_JOB_S = 0.05
stage = Stage([WIDE])
ticket = None
stage.engine.throttle(AGES)
stage.boxes.arm()
stage.post(0)
stage.device.wait_until_begun(0)
if "queued" in sys.argv:
    out = torch.empty(1, WIDE.hidden)
    ticket = stage.engine.submit(WIDE, stage.store.addresses(0), *stage.batch(0, 1, 0), out)
    del out
assert not stage.boxes.abandon(0.05)
native, done = stage.engine._native, ctypes.c_uint32.from_address(stage.boxes.done.data_ptr())
if "close" in sys.argv:
    stage.boxes.close()
    stage.engine.close()
    stage.engine.close()
    stage.store.close()
    print("closed")
del stage, ticket
gc.collect()
if "resume" in sys.argv:
    done.value = 0
    waste = [bytes(1 << 20) for _ in range(64)]  # what was freed would be used again
    load_library().gr_engine_throttle(native, 1.0)
    end = time.monotonic() + 20
    while not done.value:
        assert time.monotonic() < end
    print("resumed")
print("the end")
"""


@pytest.mark.parametrize(
    "how",
    [["close"], ["close", "queued", "resume"], ["resume"], []],
    ids=["closed", "closed-resumes", "resumes", "dropped"],
)
def test_a_job_that_never_ends(how: list[str]) -> None:
    """In a process of its own, which ends in spite of the job."""
    done = subprocess.run(
        [sys.executable, "-c", _NEVER_ENDS, *how],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [
        *(["closed"] if "close" in how else []),
        *(["resumed"] if "resume" in how else []),
        "the end",
    ]
    if "close" in how:
        assert "job of layer 0 was given up and has not ended" in done.stderr
        assert done.stderr.count("the CPU engine's threads are left running") == 1
    else:
        assert "mailboxes were dropped while a job of the CPU engine lasts" in done.stderr
