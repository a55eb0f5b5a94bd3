"""A job for which a GPU waits, on an engine that may hang; the GPU is a word in memory."""

import time

import pytest
import torch

from greenroom.errors import EngineError
from greenroom.experts import open_job
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.formats import ExpertFormat
from greenroom.experts.open_job import OpenJob
from greenroom.experts.ticket import Ending
from tests.experts.stage import AGES
from tests.kernels.batches import SILU, Batch

LAYER, TOKENS = 7, 4


class Waited:
    """A job of ``engine``, what it writes, and what it should."""

    def __init__(self, engine: CpuExperts) -> None:
        batch = Batch(ExpertFormat(33, 17, torch.float32, SILU), 3, 2, TOKENS, seed=0)
        self.expected = batch.run(engine)
        self.done, busy_ns = torch.full((1,), 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
        self.ending = Ending(self.done, 5, busy_ns)
        self.out = torch.empty(TOKENS, 33)
        self.submit = lambda: OpenJob(
            LAYER,
            engine.submit(
                batch.format,
                batch.experts.addresses,
                batch.hidden,
                batch.ids,
                batch.weights,
                self.out,
                ending=self.ending,
            ),
            self.ending,
            TOKENS,
            0.0,
        )


def test_a_job_tells_its_seconds() -> None:
    with CpuExperts(1) as engine:
        waited = Waited(engine)
        started = time.perf_counter()
        seconds = waited.submit().wait()
        assert 0 < seconds < time.perf_counter() - started
        assert int(waited.done) == waited.ending.value
        assert torch.equal(waited.out, waited.expected)


def test_an_engine_that_hangs_is_named_by_layer_and_holds_up_no_device() -> None:
    with CpuExperts(1, watchdog_s=0.1) as engine:
        waited = Waited(engine)
        engine.throttle(AGES)
        job = waited.submit()
        with pytest.raises(EngineError, match=f"layer {LAYER}: the CPU engine has not got on"):
            job.wait()
        assert int(waited.done) == waited.ending.value
        engine.throttle(1)
        job.wait()
        assert torch.equal(waited.out, waited.expected), "what the job may touch was kept"


@pytest.mark.parametrize("hangs", [False, True])
def test_a_job_that_is_given_up(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_job, "_ABANDON_S", 0.1)
    with CpuExperts(1) as engine:
        waited = Waited(engine)
        if hangs:
            engine.throttle(AGES)
        job = waited.submit()
        started = time.monotonic()
        job.abandon()
        assert time.monotonic() - started < 2
        assert int(waited.done) == waited.ending.value
        assert torch.equal(waited.out, waited.expected) != hangs
        engine.throttle(1)
