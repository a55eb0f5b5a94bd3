"""Where the time goes: sums of made-up steps, and a prefill on the CPU."""

import time

import numpy as np
import pytest
import torch

from greenroom.bench.model import bench_prefill
from greenroom.bench.stages import prefill_stages, summarise_decode, timed_host
from greenroom.config import OffloadConfig
from greenroom.experts.dispatch import Dispatch

pytest.importorskip("triton")

from greenroom.experts.decode_steps import FinishedStep

US = 1000


def step(layers: list[tuple[int, int, int, int, int]]) -> FinishedStep:
    """Of each layer: experts streamed and on the CPU; microseconds of the request, the sums and the CPU's work."""
    spans = np.zeros((1, len(layers), 8), dtype=np.int64)
    lanes = np.zeros((1, len(layers), 5), dtype=np.int32)
    busy = np.zeros((1, len(layers)), dtype=np.int64)
    for number, (streamed, cpu, posted, combined, worked) in enumerate(layers):
        spans[0, number, 0], spans[0, number, 2] = posted * US, combined * US
        lanes[0, number, 1:3] = streamed, cpu
        busy[0, number] = worked * US
    nothing = np.zeros((len(layers), 1, 2))
    return FinishedStep(ids=nothing, weights=nothing, lanes=lanes, busy_ns=busy, spans=spans, landing=False)


def test_stages_of_decode():
    first = step([(1, 2, 100, 400, 250), (0, 0, 480, 520, 77), (0, 1, 600, 710, 90)])
    second = step([(1, 2, 1100, 1500, 350), (9, 1, 1590, 2000, 100), (0, 0, 2080, 2110, 0)])
    stages = summarise_decode([1000.0, 1500.0], [first, second], {"begin": [30.0, 50.0], "finish": [7.0, 9.0]})
    assert stages["step"] == 1250
    assert stages["outside"] == np.median([1000 - 610, 1500 - 1010])
    assert stages["host"] == {"begin": 40, "finish": 8}
    assert stages["between"] == np.median([80, 80, 90, 80])
    assert stages["layers"] == {
        "0": {"count": 2, "us": 35, "cpu_us": 0, "on_cpu": 0, "streamed": 0},
        "1": {"count": 1, "us": 110, "cpu_us": 90, "on_cpu": 1, "streamed": 0},
        "3": {"count": 2, "us": 350, "cpu_us": 300, "on_cpu": 2, "streamed": 1},
        "over 8": {"count": 1, "us": 410, "cpu_us": 100, "on_cpu": 1, "streamed": 9},
    }


class SleepyTier:
    """Takes so many milliseconds for each of the two."""

    device = torch.device("cpu")

    def read_routing(self, batch):
        time.sleep(0.01)
        return "routing"

    def run(self, batch, ids, plan, slot_of):
        time.sleep(0.02)
        return "out"

    def run_complete(self, batch):
        time.sleep(0.03)
        return "all"

    def run_undecided(self, batch):
        raise NotImplementedError


def test_stages_of_prefill():
    tier = SleepyTier()
    plan = Dispatch(np.ones(4), np.empty(0), (np.arange(2), np.array([2])), np.array([3]))

    def run():
        for _ in range(3):
            assert tier.read_routing(None) == "routing"
            time.sleep(0.005)
            assert tier.run(None, None, plan, None) == "out"

    stages = prefill_stages(tier, run)
    assert stages["waiting"] >= 10_000
    assert stages["deciding"] >= 5_000
    assert stages["enqueuing"] >= 20_000
    assert stages["layer"] >= 35_000
    assert (stages["streamed"], stages["on_cpu"]) == (3, 1)
    assert "device" not in stages
    assert tier.read_routing.__func__ is SleepyTier.read_routing, "as it was"


def test_stages_of_a_prefill_without_the_host():
    tier = SleepyTier()

    def run():
        for _ in range(2):
            assert tier.run_complete(None) == "all"
            time.sleep(0.005)

    stages = prefill_stages(tier, run)
    assert stages["enqueuing"] >= 30_000
    assert stages["layer"] >= 35_000
    assert (stages["waiting"], stages["deciding"], stages["streamed"], stages["on_cpu"]) == (0, 0, 0, 0)


def test_a_prefill_says_where_its_time_goes():
    (result,) = bench_prefill("small", 1, [16], OffloadConfig(device="cpu"), "uniform", repeats=1)
    stages = result.to_dict()["stages"]
    assert stages["layer"] >= stages["enqueuing"] > 0 == stages["deciding"]
    assert stages["on_cpu"] > 0 == stages["streamed"]


class SleepySteps:
    """What the host does around a step, a number of milliseconds each."""

    def begin(self, rows: int, land: bool = True) -> None:
        time.sleep(0.004)

    def enqueued(self) -> None:
        time.sleep(0.02)

    def finish(self, learn: bool = True) -> None:
        time.sleep(0.006)


def test_what_the_host_does_while_the_device_idles():
    steps = SleepySteps()
    with timed_host(steps) as host:
        for _ in range(2):
            steps.begin(1, land=False)
            time.sleep(0.005)
            steps.enqueued()
            steps.finish(False)
    assert {name: len(taken) for name, taken in host.items()} == {"begin": 2, "launch": 2, "finish": 2}
    for name, least in {"begin": 4_000, "launch": 5_000, "finish": 6_000}.items():
        assert all(least <= taken < 20_000 for taken in host[name]), host
    assert "begin" not in vars(steps), "as it was"
