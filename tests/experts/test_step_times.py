"""What a finished decode step tells the split about its lanes."""

import numpy as np
import pytest

from greenroom.experts.finished_step import FinishedStep
from greenroom.experts.idle_gap import IdleGap
from greenroom.experts.split import PARTS, SplitController

US = 1_000


def finished(rows: list[tuple[int, int, int, int, int, int]], parts: int = 1) -> FinishedStep:
    """One layer a row: experts streamed and on the CPU; microseconds at which the CPU's share was posted, the last
    streamed expert ended and combine ended; the CPU's work. The same in all parts."""
    lanes = np.zeros((parts, len(rows), 5), dtype=np.int32)
    spans = np.zeros((parts, len(rows), 8), dtype=np.int64)
    busy = np.zeros((parts, len(rows)), dtype=np.int64)
    for layer, (streamed, cpu, posted, crossed, combined, worked) in enumerate(rows):
        lanes[:, layer, 1], lanes[:, layer, 2] = streamed, cpu
        spans[:, layer, :3] = np.array([posted, crossed, combined]) * US
        busy[:, layer] = worked * US
    nothing = np.zeros((len(rows), 1, 2))
    return FinishedStep(ids=nothing, weights=nothing, lanes=lanes, busy_ns=busy, spans=spans, landing=False)


LATE = (2, 3, 1_000, 1_400, 1_900, 500)
"""The GPU had waited since 1,400 for an answer that came 400 us later than 500 us of work explain."""

ONLY_CPU = (0, 3, 3_000, 1_400, 3_700, 500)
"""Nothing crossed in this layer: the time is the one of a layer before."""

QUICK = (0, 1, 4_000, 1_400, 4_009, 5)
IN_TIME = (2, 3, 5_000, 5_900, 5_905, 500)
NO_CPU = (2, 0, 7_000, 7_500, 7_900, 99)


def test_an_answer_that_was_waited_for_shows_its_delay():
    inter = np.full(5, 64)
    times = finished([LATE, ONLY_CPU, QUICK, IN_TIME, NO_CPU]).times(inter, timed=True, gap=IdleGap())
    assert times.asked is not None
    assert times.asked.delays_s == pytest.approx([400e-6, 200e-6, 0, 0])
    assert times.asked.work_s == pytest.approx([500e-6, 500e-6, 5e-6, 500e-6])
    assert times.asked.seconds == pytest.approx([900e-6, 700e-6, 9e-6, 905e-6])
    assert (times.asked.streamed.tolist(), times.asked.cpu.tolist()) == ([2, 0, 0, 2], [3, 3, 1, 3])
    assert times.cpu_s == pytest.approx(1_505e-6)
    assert times.streamed_s == pytest.approx((400 + 900 + 500) * 1e-6)


def test_clocks_that_disagree_are_no_negative_delay():
    times = finished([(0, 1, 1_000, 0, 1_100, 120), (0, 1, 1_000, 0, 900, 120)]).times(
        np.full(2, 64), timed=True, gap=IdleGap()
    )
    assert times.asked is not None
    assert times.asked.delays_s.tolist() == [0, 0]
    assert times.asked.seconds == pytest.approx([100e-6, 0])


def test_without_a_clock_nothing_is_known_about_answers():
    times = finished([LATE, ONLY_CPU]).times(np.full(2, 64), timed=False, gap=IdleGap())
    assert times.asked is None


def test_halves_say_nothing_about_answers():
    """One's job waits for the other's."""
    times = finished([LATE, ONLY_CPU], parts=2).times(np.full(2, 64), timed=True, gap=IdleGap())
    assert times.asked is None


def test_a_divided_expert_is_on_both_lanes_in_proportion():
    step = finished([LATE])
    step.lanes[0, 0, 3:] = 7, 16
    times = step.times(np.array([64]), timed=True, gap=IdleGap())
    assert times.asked is not None
    assert (times.asked.streamed.tolist(), times.asked.cpu.tolist()) == ([2.25], [2.75])
    assert (times.streamed, times.cpu) == (2.25, 2.75)


class Device:
    """Twelve layers a step, each with ``absent`` experts; the CPU begins ``late_us`` after it is asked, combine ends
    ``gap_us`` after what it waits for. Microseconds."""

    def __init__(self, absent: int, gap_us: float, late_us: float = 5, streamed_us: float = 210, cpu_us: float = 90):
        self.absent, self.gap_us, self.late_us = absent, gap_us, late_us
        self.streamed_us, self.cpu_us = streamed_us, cpu_us
        self.random = np.random.default_rng(0)

    def step(self, parts: int) -> tuple[float, FinishedStep]:
        """Mean microseconds of a layer; what the step has noted."""
        noise = 1 + 0.06 * self.random.standard_normal((2, 12))
        streamed = parts / PARTS
        crossed = streamed * self.streamed_us * noise[0]
        work = (self.absent - streamed) * self.cpu_us * noise[1]
        answered = (work + self.late_us) * (parts < self.absent * PARTS)
        combined = np.maximum(crossed, answered) + self.gap_us + self.random.uniform(0, 1, 12)
        posted = np.arange(12) * 100_000
        lanes = np.zeros((1, 12, 5), dtype=np.int32)
        lanes[0, :, 1] = parts // PARTS
        lanes[0, :, 2] = self.absent - parts // PARTS
        lanes[0, :, 3] = 0 if parts % PARTS else -1
        lanes[0, :, 4] = parts % PARTS
        spans = np.zeros((1, 12, 4), dtype=np.int64)
        spans[0, :, 0] = posted * US
        spans[0, :, 1] = (posted + crossed) * US * (parts > 0)
        spans[0, :, 2] = (posted + combined) * US
        busy = (work * US).astype(np.int64)[None]
        nothing = np.zeros((12, 1, 2))
        return float(combined.mean()), FinishedStep(nothing, nothing, lanes, busy, spans, landing=False)


@pytest.mark.parametrize("late_us", [5, 200])
@pytest.mark.parametrize("absent", [8, 82])
@pytest.mark.parametrize("gap_us", [4, 9, 11, 14, 25])
def test_both_lanes_end_together_however_long_the_sum_takes(gap_us, absent, late_us):
    """A CPU that answers late gets less; one that answers at once is not taken for late where PCIe ends last."""
    device, gap, split = Device(absent, gap_us, late_us), IdleGap(), SplitController(190e-6, 80e-6, 128)
    layers = []
    for _ in range(200):
        us, step = device.step(int(split.stream_parts()[absent]))
        split.observe(step.times(np.full(12, PARTS), timed=True, gap=gap))
        layers.append(us)
    best = min(np.mean([device.step(parts)[0] for _ in range(20)]) for parts in range(0, absent * PARTS + 1, 2))
    assert np.mean(layers[40:]) <= 1.03 * best + 5


def waited(gap: IdleGap, rows: int, *gaps_us: int, streamed: bool = True) -> list[bool]:
    return gap.waited(rows, np.array(gaps_us) * US, np.full(len(gaps_us), streamed)).tolist()


def test_what_no_device_takes_is_a_wait_from_the_first_step_on():
    assert waited(IdleGap(), 1, 300, 60, 300) == [True, True, True]
    assert waited(IdleGap(), 1, 14, 15, 300) == [False, False, True]


def test_the_least_gap_is_known_for_each_number_of_rows_and_forgotten_slowly():
    gap = IdleGap()
    assert waited(gap, 1, 9, 20) == [False, True]
    assert waited(gap, 16, 14, 15) == [False, False]
    assert waited(gap, 1, 20, 21) == [True, True]
    for _ in range(60):
        waited(gap, 1, 20, 21)
    assert waited(gap, 1, 20, 21) == [False, False]


def test_a_clock_that_errs_once_does_not_decide():
    gap = IdleGap()
    assert waited(gap, 1, -3, 0) == [False, False]
    assert waited(gap, 1, 7) == [False]


def test_layers_of_which_nothing_crossed_say_nothing_of_the_gap():
    gap = IdleGap()
    assert waited(gap, 1, 2, 200, streamed=False) == [False, True]
    assert waited(gap, 1, 30) == [False]
