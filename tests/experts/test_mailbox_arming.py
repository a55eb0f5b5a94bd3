"""Mailboxes armed, disarmed and closed: nothing is lost, nobody hangs, nobody works for nothing."""

import math
import time

import pytest
import torch

from greenroom.errors import EngineError
from greenroom.experts.mailbox import Mailboxes
from tests.experts.stage import SLOW, SMALL, WIDE, Stage
from tests.reference.posting_device import PostingDevice

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def test_arming_wakes_workers_that_sleep() -> None:
    with Stage([SMALL]) as stage:
        for _ in range(20):
            time.sleep(0.002)  # beyond the moment for which workers spin
            stage.boxes.arm()
            stage.boxes.arm()
            stage.post(0)
            stage.device.wait(0)
            stage.boxes.disarm()
            stage.boxes.disarm()


def test_disarm_waits_for_a_job_under_way() -> None:
    with Stage([SLOW, WIDE]) as stage:
        batch = stage.batch(0, 1, 0)
        expected = stage.submitted(0, batch)
        stage.slow_down(0, 0.1)
        stage.boxes.arm()
        stage.device.write(0, *batch)
        stage.device.request(0, 1)
        stage.device.wait_until_begun(0)
        assert not stage.device.answered(0)
        stage.boxes.disarm()
        assert stage.device.answered(0), "disarm did not wait for the job"
        assert torch.equal(stage.device.result(0)[:1], expected)
        # Nobody looks any more.
        stage.post(1)
        time.sleep(0.02)
        assert stage.device.requested(1)
        assert stage.boxes.pending() == 1
        stage.boxes.arm()
        stage.device.wait(1)


def test_parked_workers_use_no_processor_time() -> None:
    with Stage([SMALL]) as stage:
        stage.boxes.arm()
        stage.post(0)
        stage.device.wait(0)
        stage.boxes.disarm()
        time.sleep(0.05)  # workers spin for a moment after a job
        start = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - start < 0.02


def test_throttle_slows_work_down() -> None:
    def fastest() -> int:
        times = []
        for _ in range(20):
            stage.post(0)
            stage.device.wait(0)
            times.append(int(stage.boxes.busy_ns[0, 0]))
        return min(times)

    with Stage([WIDE]) as stage:
        stage.boxes.arm()
        full = fastest()
        stage.engine.throttle(20)
        assert fastest() > 6 * full
        stage.engine.throttle(1)
        assert fastest() < 3 * full
        for factor in (0.5, 0.0, -1.0, math.nan, math.inf):
            with pytest.raises(EngineError, match="1 or more times"):
                stage.engine.throttle(factor)
    with pytest.raises(EngineError, match="closed"):
        stage.engine.throttle(2)


def test_closing_in_either_order() -> None:
    for i in range(24):
        with Stage([WIDE, WIDE], threads=1 + i % 3) as stage:
            if i % 2:
                stage.boxes.arm()
            stage.post(i % 2)
            if i % 4 == 1:
                stage.device.wait_until_begun(1)
            if i % 3 == 0:
                stage.boxes.close()
            stage.engine.close()
            if i % 4 == 1:
                assert stage.device.answered(1), "closed in the middle of a job"
            stage.boxes.close()
            stage.boxes.close()
            with pytest.raises(EngineError, match="closed"):
                stage.boxes.arm()
            with pytest.raises(EngineError, match="closed"):
                Mailboxes(stage.engine, stage.store, 4, 3, pin_memory=False)
            stage.boxes.disarm()
            stage.boxes.raise_failure()
            assert stage.boxes.abandon(20)
            stage.boxes.close()
            assert stage.boxes.pending() is None


def test_an_engine_keeps_mailboxes_that_nobody_holds() -> None:
    """The engine's workers read their memory."""
    with Stage([SMALL]) as stage:
        for _ in range(5):
            lane = Mailboxes(stage.engine, stage.store, 4, 3, pin_memory=False)
            device = PostingDevice(lane)
            lane.arm()
            request, done = lane.request, lane.done
            del lane, device
            request[0, 0] = 1
            end = time.monotonic() + 20
            while not done[0, 0]:
                assert time.monotonic() < end
