"""How many absent experts of a decode step go over PCIe and how many to the CPU. Pure, but for what it learns.

It counts in parts of an expert: one expert a layer may be divided between the two.

It starts from the bandwidths measured at load and then follows what steps really take, so a CPU that slows
down (a container's quota) sheds its experts within a few steps, and gets them back.

A CPU may also be quick once it has begun, and begin late: on a busy host its threads first have to get a core. What
that usually takes counts for where the two lanes meet. What it takes now and then does not: those layers wait in any
case, and all others would for PCIe. Nor do jobs that take long because their threads lose their cores. But whether the
CPU is asked at all depends on how much longer a step's layers that ask it take in the mean, for whatever reason, than
if all had taken what is usual in that step.

PCIe may have more to carry than experts: other weights that are copied ahead. Both share it half and half as long as
both are under way, so an expert then seems slow that is not, and the link stays busy when the last expert has arrived.
The split therefore counts the rest of the load as experts that PCIe has in any case.
"""

from dataclasses import dataclass

import numpy as np

PARTS = 16
"""Of an expert, in which the split is counted."""

LEAST_SHARE = 4
"""Parts that a lane gets at least, if it gets any: a thin share costs far more than its part of an expert."""

_TRUST = 0.3
"""Weight of a new step against what was known: a changed rate is followed within about five steps."""

_PROBE_AFTER = 32
"""Steps without an expert on a lane, after which it is believed to be a little faster, until it gets one again.
Each time that it then fails to keep it, the wait is doubled, so that a lane that stays slow costs next to nothing."""

_PROBE_AFTER_AT_MOST = 512
_PROBE_GAIN = 0.8
_FIRST_DELAY_S = 15e-6
"""What an idle CPU's answer takes beyond its work, until steps show it: some microseconds each way."""

_LEAST_DELAY_S = 1e-6
_EARLIER = 0.5
"""Of the delay that was known, what is taken for that of a step whose CPU usually answers before the GPU looks."""

_UNUSUAL = 3.0
"""Times the median that an expert takes in a layer whose threads lost their cores."""

_LAPSE_TRUST = 0.1
"""Lapses are rare and long: one alone should not close a lane."""

_BACK = 16
"""Steps in a row with experts that make a lane an ordinary one again."""


@dataclass(frozen=True)
class AskedLayers:
    """Layers of a step that left the CPU experts, all arrays float [n].

    streamed, cpu: experts on each lane. work_s: seconds that the CPU worked. delays_s: seconds beyond that for which
    the GPU waited for its answer, or 0 if it did not wait in the end. seconds: from asking until the layer's sums could
    be added up.
    """

    streamed: np.ndarray
    cpu: np.ndarray
    work_s: np.ndarray
    delays_s: np.ndarray
    seconds: np.ndarray


@dataclass(frozen=True)
class LaneTimes:
    """What one step's absent experts took, summed over layers.

    streamed, cpu: experts on each lane; a divided one counts on both, in proportion. streamed_s, cpu_s: seconds
    that each lane was busy. streaming_layers: layers that streamed any. asked: the layers that left the CPU any; None
    if nothing is known about them one by one.
    """

    streamed: float
    streamed_s: float
    cpu: float
    cpu_s: float
    streaming_layers: int = 0
    asked: AskedLayers | None = None


class SplitController:
    """Seconds that an expert takes on each lane, as the last steps showed.

    Attributes:
        streamed_s: seconds to read one expert over PCIe, with PCIe to itself.
        cpu_s: seconds to compute one expert on the CPU.
        delay_s: seconds a layer that the CPU's answer usually takes besides.
        lapse_s: how much longer a layer that asks the CPU takes in the mean than usually.
        link_load: what else crosses PCIe while a layer's experts do, in experts.
    """

    def __init__(self, streamed_s: float, cpu_s: float, max_experts: int, link_load: float = 0.0) -> None:
        """Infinite seconds close a lane for good; one must be open.

        Args:
            max_experts: of any layer.
        """
        if not (streamed_s > 0 and cpu_s > 0) or streamed_s == cpu_s == float("inf"):
            raise ValueError("seconds an expert must be positive, and one lane open")
        if not 0 <= link_load < float("inf"):
            raise ValueError("the load of PCIe must be 0 experts or more")
        self.streamed_s = streamed_s
        self.cpu_s = cpu_s
        self.delay_s, self.lapse_s = _FIRST_DELAY_S, 0.0
        self.link_load = link_load
        self._least_s = streamed_s
        self._max_experts = max_experts
        self._table = self._best_table()
        self._lanes = {"streamed": _LaneUse(), "cpu": _LaneUse()}

    def stream_parts(self) -> np.ndarray:
        """int32 [max_experts + 1]: of so many absent experts, how many parts to stream. The same array as the last time
        if nothing has changed."""
        return self._table

    def observe(self, times: LaneTimes) -> None:
        """Learns from a step."""
        if times.streamed + times.cpu == 0:
            return
        streaming_s = self._alone(times)
        self.streamed_s = self._follow("streamed", self.streamed_s, times.streamed, streaming_s)
        asked = times.asked if times.asked is not None and len(times.asked.cpu) else None
        on_cpu = (times.cpu, times.cpu_s) if asked is None else _usual_work(asked)
        before, self.cpu_s = self.cpu_s, self._follow("cpu", self.cpu_s, *on_cpu)
        if asked is not None:
            self._follow_answers(asked, streaming_s / times.streamed if times.streamed else 0.0, on_cpu[1] / on_cpu[0])
        elif times.cpu == 0 and self.cpu_s < before:
            # Believed to be faster, it is also believed to begin sooner.
            self.delay_s, self.lapse_s = self.delay_s * _PROBE_GAIN, self.lapse_s * _PROBE_GAIN
        # Now, since steps begin with it, and no step waits for what is learnt.
        table = self._best_table()
        if not np.array_equal(table, self._table):
            self._table = table

    def _best_table(self) -> np.ndarray:
        return split_table(self.streamed_s, self.cpu_s, self._max_experts, self.link_load, self.delay_s, self.lapse_s)

    def _alone(self, times: LaneTimes) -> float:
        """Seconds that the streamed experts would have taken with PCIe to themselves."""
        rest = min(times.streamed, self.link_load * times.streaming_layers)
        if rest == 0:
            return times.streamed_s
        # As much of the rest crossed beside them, or all that there was. If that makes the link faster than it was at
        # load, less did.
        fair = times.streamed_s * times.streamed / (times.streamed + rest)
        return max(fair, min(times.streamed_s, times.streamed * self._least_s))

    def _follow(self, lane: str, known: float, experts: float, seconds: float) -> float:
        use = self._lanes[lane]
        if experts > 0:
            use.used()
            return _towards(known, max(seconds / experts, 1e-9))
        return known * _PROBE_GAIN if use.unused() else known

    def _follow_answers(self, asked: AskedLayers, streamed_s: float, cpu_s: float) -> None:
        """``streamed_s``, ``cpu_s``: an expert's, in this step."""
        usual = float(np.median(asked.delays_s))
        self.delay_s = _towards(self.delay_s, max(usual or self.delay_s * _EARLIER, _LEAST_DELAY_S))
        # Of this step alone: a lane that has become slower as a whole is no lapse.
        streaming = (asked.streamed + self.link_load * (asked.streamed > 0)) * streamed_s
        expected = np.maximum(streaming, asked.cpu * cpu_s + usual)
        more = max(float((asked.seconds - expected).mean()), 0.0)
        # Arithmetic, unlike the others: few lapses may be most of the time that is lost.
        self.lapse_s += (more - self.lapse_s) * _LAPSE_TRUST


def _usual_work(asked: AskedLayers) -> tuple[float, float]:
    """(experts, seconds) of the CPU, without layers that took it far longer than the others."""
    each = asked.work_s / asked.cpu
    usual = each <= _UNUSUAL * np.median(each)
    return float(asked.cpu[usual].sum()), float(asked.work_s[usual].sum())


def _towards(known: float, seen: float) -> float:
    """In logarithms: what was wrong by fifty times either way is left equally fast."""
    return float(known ** (1 - _TRUST) * seen**_TRUST)


class _LaneUse:
    """How long a lane has had experts, or none, and when to try it again."""

    def __init__(self) -> None:
        self._with = self._without = 0
        self._wait = _PROBE_AFTER

    def used(self) -> None:
        if self._without >= self._wait:
            self._wait = min(2 * self._wait, _PROBE_AFTER_AT_MOST)
        self._with, self._without = self._with + 1, 0
        if self._with >= _BACK:
            self._wait = _PROBE_AFTER

    def unused(self) -> bool:
        """Whether it is time to think better of the lane."""
        self._with, self._without = 0, self._without + 1
        return self._without % self._wait == 0


def split_table(
    streamed_s: float,
    cpu_s: float,
    max_experts: int,
    link_load: float = 0.0,
    delay_s: float = 0.0,
    lapse_s: float = 0.0,
) -> np.ndarray:
    """int32 [max_experts + 1]: for each number of absent experts, how many parts of them to stream so that the slower
    of the two lanes ends soonest. Of equally good numbers the smallest.

    Args:
        link_load: experts' worth of other bytes that the streamed ones share PCIe with.
        delay_s: seconds that the CPU takes besides, if it gets any.
        lapse_s: seconds that both lanes then wait for it besides, in the mean.
    """
    all_parts = np.arange(max_experts + 1) * PARTS
    if streamed_s == float("inf"):
        return np.zeros(max_experts + 1, dtype=np.int32)
    if cpu_s == float("inf"):
        return all_parts.astype(np.int32)
    load, delay, lapse = link_load * PARTS, delay_s * PARTS, lapse_s * PARTS
    # Where both lanes would end together, or the part before or behind it; or at the ends of what is allowed.
    below = np.floor((all_parts * cpu_s + delay - load * streamed_s) / (streamed_s + cpu_s)).astype(np.int64)
    near = np.clip(below[:, None] + np.array([-1, 0, 1]), LEAST_SHARE, np.maximum(all_parts - LEAST_SHARE, 0)[:, None])
    candidates = np.concatenate([np.zeros_like(below)[:, None], near, all_parts[:, None]], axis=1)
    on_cpu = all_parts[:, None] - candidates
    asked = on_cpu > 0
    seconds = np.maximum((candidates + load) * streamed_s, on_cpu * cpu_s + asked * delay) + asked * lapse
    best = np.argmin(seconds, axis=1)
    return candidates[np.arange(max_experts + 1), best].astype(np.int32)
