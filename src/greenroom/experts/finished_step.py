"""FinishedStep: what a decode step has noted, and what it says about the speed of the lanes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from greenroom.experts.idle_gap import IdleGap
from greenroom.experts.split import AskedLayers, LaneTimes
from greenroom.experts.step_part import StepPart


@dataclass(frozen=True)
class FinishedStep:
    """Copies of what the parts of a step have noted.

    ids: int32 [layers, rows, K]. weights: float32 [layers, rows, K]. All parts' rows.
    lanes: int32 [parts, layers, 5], experts that were resident, streamed, on the CPU; the divided one, or -1, and how
        many rows of its inner width were streamed.
    busy_ns: int64 [parts, layers], the CPU's time. spans: int64 [parts, layers, 4], the device's clock.
    landing: slots were offered to the step.
    """

    ids: np.ndarray
    weights: np.ndarray
    lanes: np.ndarray
    busy_ns: np.ndarray
    spans: np.ndarray
    landing: bool

    @classmethod
    def of(cls, parts: Sequence[StepPart], landing: bool) -> "FinishedStep":
        notes = [part.notes for part in parts]
        return cls(
            np.concatenate([note.ids[:, : part.rows] for note, part in zip(notes, parts, strict=True)], axis=1),
            np.concatenate([note.weights[:, : part.rows] for note, part in zip(notes, parts, strict=True)], axis=1),
            np.stack([note.counts[:, :5] for note in notes]),
            np.stack([note.spans[:, 3] for note in notes]),
            np.stack([note.spans for note in notes]),
            landing,
        )

    def times(self, inter: np.ndarray, timed: bool, gap: IdleGap) -> LaneTimes:
        """
        Args:
            inter: int [layers], inner width of the experts.
            timed: whether the device has a clock; without one nothing is known about its lane.
            gap: of this model's steps, which learns.
        """
        divided = self.lanes[..., 4] / inter
        crossing = self.lanes[..., 1] + divided
        streamed, on_cpu = crossing > 0, self.lanes[..., 2] > 0
        spans = self.spans[streamed]
        return LaneTimes(
            streamed=float(crossing.sum()) if timed else 0,
            # Halves share the link while both read from it; their CPU jobs take turns.
            streamed_s=busy_s(spans[:, 0], spans[:, 1]),
            cpu=float((self.lanes[..., 2] - divided).sum()),
            cpu_s=float(self.busy_ns[on_cpu].sum()) / 1e9,
            streaming_layers=int(streamed.any(axis=0).sum()),
            asked=self._asked(on_cpu[0], crossing[0], divided[0], gap) if timed and len(self.lanes) == 1 else None,
        )

    def _asked(self, on_cpu: np.ndarray, crossing: np.ndarray, divided: np.ndarray, gap: IdleGap) -> AskedLayers:
        """Of a step in one piece: in halves one's answer also waits for the other's job.

        Args:
            on_cpu: bool [layers], which ones. crossing, divided: float [layers].
        """
        posted, crossed, combined = (self.spans[0, on_cpu, moment] for moment in range(3))
        # An older time means that nothing crossed.
        waited = gap.waited(self.ids.shape[1], combined - np.maximum(posted, crossed), crossing[on_cpu] > 0)
        work = self.busy_ns[0, on_cpu]
        delays = np.where(waited, np.maximum(combined - posted - work, 0), 0)
        return AskedLayers(
            streamed=crossing[on_cpu],
            cpu=(self.lanes[0, :, 2] - divided)[on_cpu],
            work_s=work / 1e9,
            delays_s=delays / 1e9,
            seconds=np.maximum(combined - posted, 0) / 1e9,
        )


def busy_s(begin_ns: np.ndarray, end_ns: np.ndarray) -> float:
    """Seconds in which at least one of some intervals was open.

    Args:
        begin_ns, end_ns: int64 [n].
    """
    if len(begin_ns) == 0:
        return 0.0
    order = np.argsort(begin_ns)
    begin, end = begin_ns[order], end_ns[order]
    covered = np.concatenate([begin[:1], np.maximum.accumulate(end)[:-1]])
    return float(np.maximum(end - np.maximum(begin, covered), 0).sum()) / 1e9
