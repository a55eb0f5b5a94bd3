"""What a finished decode step tells the split about its lanes."""

import numpy as np
import pytest

from greenroom.experts.decode_steps import FinishedStep

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
    times = finished([LATE, ONLY_CPU, QUICK, IN_TIME, NO_CPU]).times(inter, timed=True)
    assert times.asked is not None
    assert times.asked.delays_s == pytest.approx([400e-6, 200e-6, 0, 0])
    assert times.asked.work_s == pytest.approx([500e-6, 500e-6, 5e-6, 500e-6])
    assert times.asked.seconds == pytest.approx([900e-6, 700e-6, 9e-6, 905e-6])
    assert (times.asked.streamed.tolist(), times.asked.cpu.tolist()) == ([2, 0, 0, 2], [3, 3, 1, 3])
    assert times.cpu_s == pytest.approx(1_505e-6)
    assert times.streamed_s == pytest.approx((400 + 900 + 500) * 1e-6)


def test_clocks_that_disagree_are_no_negative_delay():
    times = finished([(0, 1, 1_000, 0, 1_100, 120), (0, 1, 1_000, 0, 900, 120)]).times(np.full(2, 64), timed=True)
    assert times.asked is not None
    assert times.asked.delays_s.tolist() == [0, 0]
    assert times.asked.seconds == pytest.approx([100e-6, 0])


def test_without_a_clock_nothing_is_known_about_answers():
    times = finished([LATE, ONLY_CPU]).times(np.full(2, 64), timed=False)
    assert times.asked is None


def test_halves_say_nothing_about_answers():
    """One's job waits for the other's."""
    times = finished([LATE, ONLY_CPU], parts=2).times(np.full(2, 64), timed=True)
    assert times.asked is None


def test_a_divided_expert_is_on_both_lanes_in_proportion():
    step = finished([LATE])
    step.lanes[0, 0, 3:] = 7, 16
    times = step.times(np.array([64]), timed=True)
    assert times.asked is not None
    assert (times.asked.streamed.tolist(), times.asked.cpu.tolist()) == ([2.25], [2.75])
    assert (times.streamed, times.cpu) == (2.25, 2.75)
