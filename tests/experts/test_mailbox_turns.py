"""Requests of mailboxes beside ordinary jobs and other mailboxes: each has its turn, and its own time."""

import random
import threading
import time

import pytest
import torch

from greenroom.experts.mailbox import Mailboxes
from tests.experts.stage import SLOW, SMALL, WIDE, Stage
from tests.reference.posting_device import PostingDevice

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("threads", [1, 2])
def test_cycles_with_ordinary_jobs_between(threads: int) -> None:
    dice = random.Random(threads)
    with Stage([SMALL, SMALL, WIDE], threads) as stage:
        batches = [stage.batch(layer, 3, layer) for layer in range(3)]
        expected = [stage.submitted(layer, batch) for layer, batch in enumerate(batches)]
        for layer, batch in enumerate(batches):
            stage.device.write(layer, *batch)
        for _ in range(300):
            layer, other = dice.sample(range(3), 2)
            early = dice.random() < 0.3  # posted before anybody looks
            if early:
                stage.device.request(layer, 3)
            stage.boxes.arm()
            if not early:
                stage.device.request(layer, 3)
            if dice.random() < 0.5:
                assert torch.equal(stage.submitted(other, batches[other]), expected[other])
            stage.device.wait(layer)
            assert torch.equal(stage.boxes.out[layer][:3], expected[layer])
            stage.boxes.disarm()
            if dice.random() < 0.5:
                assert torch.equal(stage.submitted(other, batches[other]), expected[other])


@pytest.mark.parametrize("threads", [1, 2])
def test_ordinary_jobs_that_never_pause_do_not_starve_requests(threads: int) -> None:
    with Stage([SMALL], threads) as stage:
        batch, stop = stage.batch(0, 4, 0), threading.Event()
        expected = stage.submitted(0, batch)
        stage.slow_down(0, 1e-3)  # the queue must not run empty while this process gets no processor
        failures: list[BaseException] = []

        def flood() -> None:
            args = (stage.store.formats[0], stage.store.addresses(0), *batch)
            outs = [torch.empty_like(expected) for _ in range(32)]
            try:
                tickets = [stage.engine.submit(*args, out) for out in outs]
                while not stop.is_set():
                    tickets.pop(0).wait()
                    outs.append(outs.pop(0))
                    assert torch.equal(outs[-1], expected)
                    tickets.append(stage.engine.submit(*args, outs[-1]))
                for ticket in tickets:
                    ticket.wait()
            except BaseException as error:  # reported by the test's own thread
                failures.append(error)

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            stage.boxes.arm()
            for _ in range(8):
                stage.device.write(0, *batch)
                stage.device.request(0, 4)
                end = time.monotonic() + 10
                while not stage.device.answered(0):
                    assert time.monotonic() < end, "the request waits for ever"
                    time.sleep(1e-4)  # for the flood
                assert torch.equal(stage.device.result(0), expected)
        finally:
            stop.set()
            thread.join(30)
        assert not failures, failures[0]


def test_jobs_run_in_the_order_in_which_they_came() -> None:
    with Stage([SMALL, SLOW]) as stage:
        batches = [stage.batch(0, 2, seed) for seed in range(5)]
        expected = [stage.submitted(0, batch) for batch in batches]
        stage.slow_down(1, 0.05)
        stage.boxes.arm()
        stage.post(1)
        stage.device.wait_until_begun(1)
        out = torch.empty_like(expected[0])
        args = (stage.store.formats[0], stage.store.addresses(0))
        tickets = [stage.engine.submit(*args, *batch, out) for batch in batches]
        for ticket in tickets:
            ticket.wait()
        assert stage.device.answered(1)
        assert torch.equal(out, expected[-1]), "the last job was not the last"


@pytest.mark.parametrize("threads", [2, 4])
def test_the_time_of_a_job_is_its_own(threads: int) -> None:
    """A request that comes while another one's job runs has to wait; it was not busy then."""
    with Stage([SMALL, SLOW], threads) as stage:
        lane = Mailboxes(stage.engine, stage.store, 4, 3, pin_memory=False)
        other = PostingDevice(lane)
        batch = stage.batch(1, 1, 0)
        stage.slow_down(1, 0.02)
        stage.boxes.arm()
        lane.arm()
        for _ in range(5):
            other.write(1, *batch)
            started = time.monotonic_ns()
            stage.post(1)
            other.request(1, 1)
            stage.device.wait(1)
            other.wait(1)
            both = int(stage.boxes.busy_ns[1, 0]) + int(lane.busy_ns[1, 0])
            assert both <= time.monotonic_ns() - started
        lane.close()


def test_two_lanes_are_armed_apart() -> None:
    with Stage([SMALL, WIDE]) as stage:
        lane = Mailboxes(stage.engine, stage.store, 4, 3, pin_memory=False)
        other = PostingDevice(lane)
        batch = stage.batch(1, 2, 5)
        expected = stage.submitted(1, batch)
        stage.boxes.arm()
        lane.arm()
        for _ in range(100):
            for device in (stage.device, other):
                device.write(1, *batch)
                device.request(1, 2)
            for device in (other, stage.device):
                assert torch.equal(device.result(1)[:2], expected)
        stage.boxes.disarm()
        other.request(1, 2)
        other.wait(1)
        stage.device.request(1, 2)
        time.sleep(0.02)
        assert not stage.device.answered(1), "a disarmed mailbox was served"
        assert (stage.boxes.pending(), lane.pending()) == (1, None)
        lane.arm()
        lane.close()
        other.request(1, 2)
        time.sleep(0.02)
        assert other.requested(1), "a closed mailbox was served"
        stage.boxes.arm()
        stage.device.wait(1)
