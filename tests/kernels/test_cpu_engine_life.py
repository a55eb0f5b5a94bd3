"""The engine around its kernels: errors, arguments, threads, and how it ends."""

import math
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from greenroom.errors import ConfigError, EngineError
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.native import Isa, supported_isas
from greenroom.experts.ticket import Ending
from tests.kernels.batches import SILU, Batch, Engines
from tests.reference.native_threads import engine_tasks, engine_tasks_left


def test_errors_reach_the_caller(engines: Engines) -> None:
    engine = engines.get(2, Isa.AUTO)
    batch = Batch(ExpertFormat(16, 8, torch.float32, SILU), 2, 1, 4, seed=0)
    batch.ids.fill_(1)
    args = (batch.hidden, batch.ids, batch.weights, torch.empty(4, 16))
    ungated = ExpertFormat(16, 8, torch.float32, Activation(ActivationKind.SWIGLU_OAI), gated=False)
    with pytest.raises(EngineError, match="needs experts with a gate"):
        engine.run(ungated, batch.experts.addresses, *args)
    with pytest.raises(EngineError, match="clamp"):
        engine.run(
            ExpertFormat(16, 8, torch.float32, Activation(ActivationKind.SILU, limit=-1.0)),
            batch.experts.addresses,
            *args,
        )
    with pytest.raises(EngineError, match="expert 1 was chosen but has no block"):
        engine.run(batch.format, np.zeros(2, dtype=np.uint64), *args)
    for row in (0, 8, -32, 64, 2**31 - 1, -(2**31)):
        wide = Batch(ExpertFormat(16, 64, torch.float32, SILU), 2, 1, 4, seed=0)
        wide.divided = (0, row)
        with pytest.raises(EngineError, match=f"expert 0 cannot be divided at row {row} of its inner width 64, only"):
            wide.run(engine)
    # The engine still works, and one bad job does not touch its neighbours.
    good = [engine.submit(batch.format, batch.experts.addresses, *args) for _ in range(3)]
    bad = engine.submit(batch.format, np.zeros(2, dtype=np.uint64), *args)
    good.append(engine.submit(batch.format, batch.experts.addresses, *args))
    with pytest.raises(EngineError, match="no block"):
        bad.wait()
    for ticket in good:
        ticket.wait()
    batch.check(args[-1], engine.isa)
    with pytest.raises(EngineError, match="once"):
        good[0].wait()


_OUT_OF_MEMORY = """
import resource
import numpy as np, torch
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.native import Isa
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat

fmt = ExpertFormat(16, 65536, torch.bfloat16, Activation(ActivationKind.SILU))
memory = torch.zeros(fmt.block_bytes + 64, dtype=torch.uint8)
address = np.array([-(-memory.data_ptr() // 64) * 64], dtype=np.uint64)

def run(engine, choices):
    hidden, ids = torch.ones(64, 16, dtype=torch.bfloat16), torch.zeros(64, choices, dtype=torch.int32)
    engine.run(fmt, address, hidden, ids, torch.ones(64, choices), torch.empty(64, 16))

with CpuExperts(2, None, Isa.AUTO) as engine:
    run(engine, 1)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
    try:
        run(engine, 1000)  # 8 GiB of activation rows
    except Exception as error:
        print(type(error).__name__, error)
    run(engine, 1)
    print("still runs")
"""


def test_no_memory_for_a_batch_is_an_error_and_no_end() -> None:
    """In a process whose memory is limited: how much another may take depends on the machine."""
    done = subprocess.run([sys.executable, "-c", _OUT_OF_MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "EngineError the CPU engine could not get memory" in done.stdout
    assert "still runs" in done.stdout


def test_wrong_tensors_are_refused(engines: Engines) -> None:
    engine = engines.get(1, Isa.AUTO)
    batch = Batch(ExpertFormat(16, 8, torch.float32, SILU), 2, 1, 4, seed=0)
    good = {
        "format": batch.format,
        "experts": batch.experts.addresses,
        "hidden": batch.hidden,
        "ids": batch.ids,
        "weights": batch.weights,
        "out": torch.empty(4, 16),
    }
    for name, wrong in {
        "hidden": batch.hidden.half(),
        "ids": batch.ids.long(),
        "weights": torch.rand(4, 2),
        "out": torch.empty(16, 4).T,
        "experts": batch.experts.addresses.astype(np.int64),
    }.items():
        with pytest.raises(ValueError, match=name):
            engine.run(**{**good, name: wrong})


def test_engine_arguments() -> None:
    with pytest.raises(EngineError, match="at least one thread"):
        CpuExperts(0)
    with pytest.raises(ConfigError, match="core numbers"):
        CpuExperts(2, cores=[0])
    before = len(engine_tasks())
    for core in (-1, 1023, 1 << 20):
        with pytest.raises(EngineError, match=f"pinned to core {core}"):
            CpuExperts(1, cores=[core])
    assert engine_tasks_left(before) == before
    with pytest.raises(ConfigError, match="portable"):
        Isa.parse("sse")
    assert Isa.parse("auto") is Isa.AUTO
    for isa in supported_isas():
        assert Isa.parse(isa.label) is isa
        with CpuExperts(1, isa=isa) as engine:
            assert (engine.threads, engine.isa) == (1, isa)


def test_by_default_the_best_isa_is_taken() -> None:
    with CpuExperts(1) as engine:
        assert engine.isa is supported_isas()[-1]


def test_pinned_threads_run_where_they_were_put() -> None:
    core = max(os.sched_getaffinity(0))
    before = engine_tasks()
    with CpuExperts(2, cores=[core, core]) as engine:
        masks = [os.sched_getaffinity(int(task.name)) for task in engine_tasks() if task not in before]
        assert masks == [{core}, {core}]
        batch = Batch(ExpertFormat(33, 17, torch.bfloat16, SILU), 2, 2, 20, seed=0)
        batch.check(batch.run(engine), engine.isa)


def test_jobs_from_many_threads() -> None:
    """Every job gets its own result, however they interleave."""
    failures: list[BaseException] = []
    with CpuExperts(3) as engine:
        batches = [Batch(ExpertFormat(40 + i, 24, torch.bfloat16, SILU), 5, 2, 3 + 7 * i, seed=i) for i in range(4)]
        expected = [batch.run(engine) for batch in batches]

        def client(i: int) -> None:
            try:
                batch = batches[i]
                for _ in range(40):
                    outs = [torch.full_like(expected[i], math.nan) for _ in range(4)]
                    tickets = [
                        engine.submit(
                            batch.format, batch.experts.addresses, batch.hidden, batch.ids, batch.weights, out
                        )
                        for out in outs
                    ]
                    for ticket, out in zip(reversed(tickets), reversed(outs), strict=True):
                        ticket.wait()
                        assert torch.equal(out, expected[i])
            except BaseException as error:  # reported by the test's own thread
                failures.append(error)

        clients = [threading.Thread(target=client, args=(i,)) for i in range(4)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(60)
        assert not any(thread.is_alive() for thread in clients), "a wake-up was lost"
    assert not failures, failures[0]


def test_close_finishes_submitted_jobs() -> None:
    batch = Batch(ExpertFormat(256, 128, torch.bfloat16, SILU), 8, 4, 64, seed=0)
    engine = CpuExperts(3)
    expected = batch.run(engine)
    outs = [torch.full_like(expected, math.nan) for _ in range(20)]
    args = (batch.format, batch.experts.addresses, batch.hidden, batch.ids, batch.weights)
    tickets = [engine.submit(*args, out) for out in outs]
    engine.close()
    assert all(torch.equal(out, expected) for out in outs)
    tickets[3].wait()
    with pytest.raises(EngineError, match="once"):
        tickets[3].wait()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.submit(*args, outs[0])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_device_is_told_of_the_end_behind_the_output(threads: int) -> None:
    batch = Batch(ExpertFormat(256, 128, torch.bfloat16, SILU), 8, 4, 64, seed=0)
    words, busy_ns = torch.zeros(16, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    seen = words.numpy()
    with CpuExperts(threads) as engine:
        expected = batch.run(engine)
        out = torch.empty_like(expected)
        for value in [*range(1, 200), 2**31 - 1]:
            out.fill_(math.nan)
            busy_ns.zero_()
            ending = Ending(words[:1], value, busy_ns)
            began = time.monotonic_ns()
            ticket = engine.submit(
                batch.format, batch.experts.addresses, batch.hidden, batch.ids, batch.weights, out, ending=ending
            )
            while seen[0] != value:
                assert time.monotonic_ns() - began < 10e9
            assert torch.equal(out, expected)
            assert 0 < int(busy_ns) <= time.monotonic_ns() - began
            ticket.wait()
        assert not seen[1:].any()


def test_no_thread_survives_its_engine() -> None:
    before = len(engine_tasks())
    batch = Batch(ExpertFormat(33, 17, torch.float32, SILU), 2, 1, 2, seed=0)
    for i in range(60):
        engine = CpuExperts(3)
        if i % 3 == 1:
            batch.run(engine)
        if i % 3 == 2:  # closed while its workers are busy
            out = torch.empty(2, 33)
            engine.submit(batch.format, batch.experts.addresses, batch.hidden, batch.ids, batch.weights, out)
        assert len(engine_tasks()) == before + 3
        engine.close()
        assert engine_tasks_left(before) == before


def test_idle_workers_use_no_processor_time() -> None:
    with CpuExperts(3) as engine:
        batch = Batch(ExpertFormat(33, 17, torch.float32, SILU), 2, 1, 2, seed=0)
        batch.run(engine)
        time.sleep(0.1)  # workers spin for a moment after a job
        start = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - start < 0.05


@pytest.mark.parametrize("threads", [1, 2])
def test_no_wake_up_is_lost(threads: int) -> None:
    """Jobs that arrive while workers fall asleep, which they do 200 us after the last one."""
    done = threading.Event()

    def client() -> None:
        with CpuExperts(threads) as engine:
            batch = Batch(ExpertFormat(33, 17, torch.bfloat16, SILU), 2, 1, 2, seed=0)
            expected = batch.run(engine)
            for i in range(4000):
                submit_at = time.perf_counter() + 185e-6 + (i % 400) * 1e-7
                while time.perf_counter() < submit_at:
                    pass
                assert torch.equal(batch.run(engine), expected)
        done.set()

    thread = threading.Thread(target=client, daemon=True)
    thread.start()
    thread.join(30)
    assert done.is_set(), "a job did not end"
