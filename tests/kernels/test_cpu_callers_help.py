"""Engines whose callers work while they wait: the same results, and nobody waits longer than before."""

import threading
import time

import pytest
import torch

from greenroom.errors import EngineError
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.formats import ExpertFormat
from greenroom.experts.native import Isa
from greenroom.experts.ticket import LateJobError
from tests.experts.stage import AGES
from tests.kernels.batches import SILU, Batch, Engines
from tests.reference.native_threads import engine_tasks

BF16 = torch.bfloat16


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_are_the_same_to_the_bit(engines: Engines, threads: int) -> None:
    engine = engines.get(1, Isa.AUTO, batch_invariant=True)
    weight, x = torch.randn(300, 90).to(BF16), torch.randn(2, 90).to(BF16)
    with CpuExperts(threads, batch_invariant=True, callers_help=True) as helped:
        for tokens in (1, 3, 70):
            batch = Batch(ExpertFormat(130, 48, BF16, SILU), 5, 3, tokens, seed=tokens)
            expected = batch.run(engine)
            batch.check(expected, engine.isa)
            for _ in range(20):
                assert torch.equal(batch.run(helped), expected)
                assert torch.equal(helped.linear(weight, x), engine.linear(weight, x))


def test_the_caller_is_one_of_the_threads() -> None:
    before = len(engine_tasks())
    for threads, workers in ((1, 1), (2, 1), (4, 3)):
        with CpuExperts(threads, callers_help=True):
            assert len(engine_tasks()) - before == workers
        with CpuExperts(threads):
            assert len(engine_tasks()) - before == threads


def test_the_caller_works() -> None:
    """By its processor time, against that of the whole process."""
    batch = Batch(ExpertFormat(1024, 1024, torch.float32, SILU), 4, 4, 64, seed=0)
    shares = {}
    for helps in (False, True):
        with CpuExperts(2, callers_help=helps) as engine:
            batch.run(engine)
            began = time.thread_time(), time.process_time()
            for _ in range(20):
                batch.run(engine)
            own, whole = time.thread_time() - began[0], time.process_time() - began[1]
            shares[helps] = own / whole
    assert shares[True] > 0.2
    assert shares[False] < 0.1


def test_many_callers_at_once() -> None:
    """One helps, the others wait; jobs of one are computed by another's caller."""
    batches = [Batch(ExpertFormat(300, 200, torch.float32, SILU), 8, 4, 40 + seed, seed) for seed in range(6)]
    with CpuExperts(3, batch_invariant=True, callers_help=True) as engine:
        expected = [batch.run(engine) for batch in batches]
        wrong = []

        def call(number: int) -> None:
            wrong.extend(number for _ in range(60) if not torch.equal(batches[number].run(engine), expected[number]))

        callers = [threading.Thread(target=call, args=(number,)) for number in range(len(batches))]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert wrong == []


def test_errors_and_jobs_that_nobody_waits_for() -> None:
    batch = Batch(ExpertFormat(33, 17, torch.float32, SILU), 3, 2, 4, seed=0)
    engine = CpuExperts(2, callers_help=True)
    expected = batch.run(engine)
    for _ in range(30):
        with pytest.raises(EngineError, match="was chosen but has no block"):
            engine.run(batch.format, batch.experts.addresses * 0, batch.hidden, batch.ids, batch.weights, expected * 0)
        assert torch.equal(batch.run(engine), expected)
    outs = [torch.empty(4, 33) for _ in range(50)]
    for out in outs:
        engine.submit(batch.format, batch.experts.addresses, batch.hidden, batch.ids, batch.weights, out)
    engine.close()
    assert all(torch.equal(out, expected) for out in outs)


def test_a_job_that_hangs_in_a_worker_is_given_up() -> None:
    batch = Batch(ExpertFormat(33, 17, torch.float32, SILU), 3, 2, 4, seed=0)
    with CpuExperts(2, watchdog_s=0.1, callers_help=True) as engine:
        expected = batch.run(engine)
        engine.throttle(AGES)
        with pytest.raises(LateJobError, match=r"has not got on with its work for 0\.1 s"):
            batch.run(engine)
        engine.throttle(1)
        assert torch.equal(batch.run(engine), expected)
