"""Jobs of the engine that do not get on: nobody waits for them for ever, and nothing is freed under them."""

import itertools
import logging
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from greenroom.errors import EngineError
from greenroom.experts import cpu
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.formats import ExpertFormat
from greenroom.experts.ticket import LateJobError, Ticket
from tests.experts.stage import AGES
from tests.kernels.batches import SILU, Batch

SOON = 0.1


def make_batch() -> Batch:
    return Batch(ExpertFormat(33, 17, torch.float32, SILU), 3, 2, 4, seed=0)


def submit(engine: CpuExperts, batch: Batch, out: torch.Tensor) -> Ticket:
    return engine.submit(batch.format, batch.experts.addresses, batch.hidden, batch.ids, batch.weights, out)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_job_that_hangs_is_waited_for_for_a_while_and_may_still_end(threads: int) -> None:
    batch, outs = make_batch(), [torch.empty(4, 33) for _ in range(2)]
    with CpuExperts(threads, watchdog_s=SOON) as engine:
        expected = batch.run(engine)
        engine.throttle(AGES)
        tickets = [submit(engine, batch, out) for out in outs]
        for ticket in (*tickets, tickets[0]):
            started = time.monotonic()
            with pytest.raises(LateJobError, match=r"has not got on with its work for 0\.1 s"):
                ticket.wait()
            assert SOON <= time.monotonic() - started < 20 * SOON
        assert not tickets[0].settle(0)
        engine.throttle(1)
        for ticket, out in zip(tickets, outs, strict=True):
            ticket.wait()
            assert torch.equal(out, expected)
            assert ticket.settle(0)
            with pytest.raises(EngineError, match="already waited for"):
                ticket.wait()


def test_a_job_that_gets_on_slowly_is_waited_for() -> None:
    """Units end one by one, since a change of the throttle ends the pauses; all of them take many times the limit."""
    batch, limit = Batch(ExpertFormat(512, 512, torch.float32, SILU), 8, 4, 16, seed=0), 1.0
    with CpuExperts(1, watchdog_s=limit) as engine:
        expected = batch.run(engine)
        engine.throttle(AGES)
        outs = [torch.empty(16, 512) for _ in range(8)]
        tickets = [submit(engine, batch, out) for out in outs]
        enough = threading.Event()

        def let_units_end() -> None:
            for factor in itertools.cycle((2 * AGES, AGES)):
                if enough.wait(limit / 8):
                    break
                engine.throttle(factor)
            engine.throttle(1)

        helper = threading.Thread(target=let_units_end)
        helper.start()
        threading.Timer(3.2 * limit, enough.set).start()
        started = time.perf_counter()
        for ticket in reversed(tickets):
            ticket.wait()
        assert time.perf_counter() - started > 3 * limit
        helper.join()
        assert all(torch.equal(out, expected) for out in outs)


def test_a_batch_that_hangs_keeps_its_memory_until_it_ends() -> None:
    class Blocks:
        pass

    batch, out, blocks = make_batch(), torch.empty(4, 33), Blocks()
    alive = weakref.ref(blocks)
    with CpuExperts(1, watchdog_s=SOON) as engine:
        engine.throttle(AGES)
        arguments = batch.format, batch.experts.addresses, batch.hidden, batch.ids, batch.weights, out
        ticket = engine.submit(*arguments, memory=(blocks,))
        del blocks
        with pytest.raises(LateJobError):
            ticket.wait()
        assert alive() is not None
        engine.throttle(1)
        ticket.wait()
        assert alive() is None


_IS_STOPPED = """
import threading
from greenroom.experts.cpu import CpuExperts
from tests.kernels.test_cpu_engine_hangs import AGES, make_batch

batch = make_batch()
with CpuExperts(1, watchdog_s=2.4) as engine:
    batch.run(engine)
    engine.throttle(AGES)
    threading.Timer(4.0, engine.throttle, [1]).start()
    print("waits", flush=True)
    batch.run(engine)
print("goes on", flush=True)
"""


def test_while_the_process_is_stopped_nothing_is_waited_for() -> None:
    """It is stopped for longer than the limit, and runs for less until the job gets on."""
    with subprocess.Popen([sys.executable, "-c", _IS_STOPPED], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "waits\n"
        time.sleep(0.2)
        child.send_signal(signal.SIGSTOP)
        time.sleep(3.0)
        child.send_signal(signal.SIGCONT)
        assert child.stdout.read() == "goes on\n"
    assert child.returncode == 0


_CLOSES = """
import logging, time
import torch
from greenroom.experts import cpu
from greenroom.experts.cpu import CpuExperts
from tests.kernels.test_cpu_engine_hangs import AGES, SOON, make_batch, submit

logging.basicConfig()
cpu._LATE_JOB_S = SOON
batch = make_batch()
engine = CpuExperts(2, watchdog_s=SOON)
batch.run(engine)
engine.throttle(AGES)
tickets = [submit(engine, batch, torch.empty(4, 33)) for _ in range(3)]
started = time.monotonic()
engine.close()
engine.close()
assert time.monotonic() - started < 30 * SOON
del engine, tickets, batch
print("goes on")
"""


def test_an_engine_closes_though_a_job_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", _CLOSES], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "goes on" in done.stdout
    assert done.stderr.count("threads are left running") == 1


def test_a_slow_job_does_not_keep_an_engine_from_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "_LATE_JOB_S", 30.0)
    batch, out = make_batch(), torch.empty(4, 33)
    engine = CpuExperts(1)
    expected = batch.run(engine)
    engine.throttle(100)
    submit(engine, batch, out)
    with caplog.at_level(logging.WARNING):
        engine.close()
    assert torch.equal(out, expected)
    assert not caplog.records
