"""Where the time of a decode step and of a prefill goes, stage by stage."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from greenroom.experts.dispatch import Dispatch
from greenroom.experts.tier import DeviceTier, LayerBatch

if TYPE_CHECKING:  # these need triton
    from greenroom.engine.step_runner import StepRunner
    from greenroom.experts.decode_steps import DecodeSteps
    from greenroom.experts.finished_step import FinishedStep

STEPS = 20
"""Of decode."""

_MOST_MISSING = 8
"""Absent experts of a layer; those with more are counted together."""

Stages = dict[str, Any]
"""Microseconds by stage, medians; numbers of experts, means."""


def decode_stages(runner: "StepRunner") -> Stages:
    """Of a few more steps, each of which is waited for: so what the host does between two of them counts in full, which
    it otherwise does while the device works."""
    walls, steps = [], []
    with timed_host(runner.steps) as host:
        for _ in range(STEPS):
            started = time.perf_counter()
            runner.step()
            torch.cuda.synchronize()
            walls.append((time.perf_counter() - started) * 1e6)
            assert runner.steps.last is not None
            steps.append(runner.steps.last)
    return summarise_decode(walls, steps, host)


@contextmanager
def timed_host(steps: "DecodeSteps") -> Iterator[dict[str, list[float]]]:
    """Microseconds of what the host does while the device idles, by stage, an entry a step."""
    taken: dict[str, list[float]] = {"begin": [], "launch": [], "finish": []}
    begin, enqueued, finish = steps.begin, steps.enqueued, steps.finish
    begun = 0.0

    def timed_begin(*args: Any, **named: Any) -> None:
        nonlocal begun
        started = time.perf_counter()
        begin(*args, **named)
        begun = time.perf_counter()
        taken["begin"].append((begun - started) * 1e6)

    def timed_enqueued() -> None:
        taken["launch"].append((time.perf_counter() - begun) * 1e6)
        enqueued()

    def timed_finish(learn: bool = True) -> None:
        started = time.perf_counter()
        finish(learn)
        taken["finish"].append((time.perf_counter() - started) * 1e6)

    with mock.patch.multiple(steps, begin=timed_begin, enqueued=timed_enqueued, finish=timed_finish):
        yield taken


def summarise_decode(
    walls_us: Sequence[float], steps: "Sequence[FinishedStep]", host_us: Mapping[str, Sequence[float]]
) -> Stages:
    """
    Args:
        host_us: what the host does while the device idles, by stage.

    Returns:
        step: by the host's clock. outside: of it, what is neither experts nor between two layers of them: the host,
        the first layer's attention, the head. host: of ``outside``, by stage. between: from one layer's sums to the
        next one's experts. layers: by the number of absent experts, a layer's experts until their sums are added up
        (``us``), what the CPU worked of it, and how many experts crossed PCIe, parts counted as such.
    """
    spans = np.stack([step.spans[0] for step in steps]) / 1e3
    lanes = np.stack([step.lanes[0] for step in steps])
    busy = np.stack([step.busy_ns[0] for step in steps]) / 1e3
    posted, combined = spans[..., 0], spans[..., 2]
    inside = combined[:, -1] - posted[:, 0]
    by_missing: dict[str, list[tuple[int, int]]] = defaultdict(list)
    missing = lanes[..., 1] + lanes[..., 2]
    for step, layer in np.ndindex(missing.shape):
        number = missing[step, layer]
        by_missing[str(number) if number <= _MOST_MISSING else f"over {_MOST_MISSING}"].append((step, layer))
    layers = {}
    for name, places in sorted(by_missing.items()):
        at = tuple(np.array(places).T)
        asked = lanes[..., 2][at] > 0
        layers[name] = {
            "count": len(places),
            "us": _median((combined - posted)[at]),
            "cpu_us": _median(busy[at][asked]) if asked.any() else 0.0,
            "on_cpu": round(float(lanes[..., 2][at].mean()), 2),
            "streamed": round(float(lanes[..., 1][at].mean()), 2),
        }
    return {
        "step": _median(walls_us),
        "outside": _median(np.array(walls_us) - inside),
        "host": {name: _median(taken) for name, taken in host_us.items()},
        "between": _median(posted[:, 1:] - combined[:, :-1]) if posted.shape[1] > 1 else 0.0,
        "layers": layers,
    }


@dataclass
class _Layer:
    """Host's clock in seconds; events on the device's stream, none without a GPU."""

    asked: float
    known: float = 0.0
    begun: float = 0.0
    ended: float = 0.0
    events: list[torch.cuda.Event] = field(default_factory=list)
    streamed: int = 0
    on_cpu: int = 0


def prefill_stages(tier: DeviceTier, run: Callable[[], None]) -> Stages:
    """Of one more prefill, ``run``, through ``tier``.

    Returns:
        layer: from one layer's routing to the next one's, by the host's clock, or where the host does not read it from
        one layer's begin to the next one's. waiting: of it, until the routing is on the host; deciding; enqueuing:
        copies, the CPU's job, the GPU's work. On the device's clock, with a GPU: device, from the begin of a layer's
        experts to the end, and between, to the next layer's. streamed, on_cpu: experts; without a GPU the CPU computes
        those that have a slot, too.
    """
    with _noted(tier) as layers:
        run()
    if tier.device.type == "cuda":
        torch.cuda.synchronize(tier.device)
    return _summarise_prefill(layers)


@contextmanager
def _noted(tier: DeviceTier) -> Iterator[list[_Layer]]:
    layers: list[_Layer] = []
    read, run = tier.read_routing, tier.run
    on_gpu = tier.device.type == "cuda"

    def mark(layer: _Layer) -> None:
        if on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(tier.device))
            layer.events.append(event)

    def timed_read(batch: LayerBatch) -> Any:
        layers.append(_Layer(time.perf_counter()))
        routing = read(batch)
        layers[-1].known = time.perf_counter()
        return routing

    def timed_run(batch: LayerBatch, ids: np.ndarray, plan: Dispatch, slot_of: np.ndarray) -> torch.Tensor:
        layer = layers[-1]
        layer.begun = time.perf_counter()
        layer.streamed, layer.on_cpu = sum(map(len, plan.streamed)), len(plan.cpu)
        mark(layer)
        result = run(batch, ids, plan, slot_of)
        mark(layer)
        layer.ended = time.perf_counter()
        return result

    def timed_whole(run_whole: Callable[[LayerBatch], torch.Tensor], on_cpu: bool) -> Any:
        """Of a layer that the host does not decide."""

        def timed(batch: LayerBatch) -> torch.Tensor:
            now = time.perf_counter()
            layer = _Layer(now, now, now, on_cpu=len(torch.unique(batch.ids)) if on_cpu else 0)
            layers.append(layer)
            mark(layer)
            result = run_whole(batch)
            mark(layer)
            layer.ended = time.perf_counter()
            return result

        return timed

    timed: dict[str, Any] = {"read_routing": timed_read, "run": timed_run}
    timed["run_complete"] = timed_whole(tier.run_complete, on_cpu=False)
    timed["run_undecided"] = timed_whole(tier.run_undecided, on_cpu=True)
    with mock.patch.multiple(tier, **timed):
        yield layers


def _summarise_prefill(layers: Sequence[_Layer]) -> Stages:
    following = list(pairwise(layers))
    stages = {
        "layer": [(after.known - layer.known) * 1e6 for layer, after in following],
        "waiting": [(layer.known - layer.asked) * 1e6 for layer in layers],
        "deciding": [(layer.begun - layer.known) * 1e6 for layer in layers],
        "enqueuing": [(layer.ended - layer.begun) * 1e6 for layer in layers],
    }
    if all(layer.events for layer in layers):
        stages["device"] = [layer.events[0].elapsed_time(layer.events[1]) * 1e3 for layer in layers]
        stages["between"] = [a.events[1].elapsed_time(b.events[0]) * 1e3 for a, b in following]
    result: Stages = {name: _median(values) for name, values in stages.items() if values}
    for name in ("streamed", "on_cpu"):
        result[name] = round(statistics.mean(getattr(layer, name) for layer in layers), 1)
    return result


def _median(values: Any) -> float:
    return round(float(np.median(values)), 1)
