"""Counters of all ranks in the metrics of vLLM's server, and in its log.

Workers are processes of their own. Each writes its counters into a small file named after the engine; the process
that was asked for metrics reads those files.
"""

import atexit
import logging
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from prometheus_client.core import REGISTRY, CounterMetricFamily
from prometheus_client.registry import Collector

from greenroom.experts.counters import COUNTER_NAMES, Counters, LayerCounters

logger = logging.getLogger("vllm.greenroom")  # below vLLM's own, which has the handlers

LOG_EVERY_S = 10.0

_DESCRIPTIONS = {
    "hits": "Experts used from a cache slot.",
    "misses": "Experts used that had no cache slot.",
    "streamed": "Experts without a slot that the GPU read over PCIe.",
    "cpu": "Experts without a slot that the CPU computed.",
    "admissions": "Experts copied into a cache slot.",
    "evictions": "Experts removed from a cache slot.",
    "landed": "Experts that the GPU read over PCIe straight into a cache slot.",
}


class CounterFile:
    """A rank's counters, for other processes. One writer."""

    def __init__(self, engine_id: str, rank: int, layers: int) -> None:
        """The file is removed on ``close``."""
        self.path = _folder() / f"greenroom-{engine_id}-{rank}"
        shape = (layers, len(COUNTER_NAMES))
        self._table: np.memmap | None = np.memmap(self.path, dtype=np.int64, mode="w+", shape=shape)
        self._logged = LayerCounters(*[0] * len(COUNTER_NAMES))
        self._log_at = time.monotonic() + LOG_EVERY_S

    def publish(self, counters: Counters) -> None:
        """Shows ``counters`` as they are now; from time to time says in the log what has changed."""
        if self._table is None:
            return
        self._table[:] = counters.table()
        if time.monotonic() >= self._log_at:
            self._log_at = time.monotonic() + LOG_EVERY_S
            total = counters.total()
            if (line := describe(self._logged, total)) is not None:
                logger.info(line)
            self._logged = total

    def close(self) -> None:
        """Idempotent."""
        if self._table is not None:
            self._table = None
            self.path.unlink(missing_ok=True)


def describe(before: LayerCounters, now: LayerCounters) -> str | None:
    """A log line about what happened between two totals; None if nothing did."""
    hits, misses = now.hits - before.hits, now.misses - before.misses
    if hits + misses == 0:
        return None
    return (
        f"Expert offloading: {100 * hits / (hits + misses):.1f}% of experts from slots, "
        f"{now.streamed - before.streamed} streamed, {now.cpu - before.cpu} on the CPU, "
        f"{now.admissions - before.admissions} admitted"
    )


class RankCollector(Collector):
    """Reads the files of an engine's ranks whenever metrics are asked for."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id

    def collect(self) -> Iterable[CounterMetricFamily]:
        """``greenroom_expert_<name>_total`` by rank and layer of experts."""
        families = {
            name: CounterMetricFamily(f"greenroom_expert_{name}", _DESCRIPTIONS[name], labels=("rank", "layer"))
            for name in COUNTER_NAMES
        }
        for path in sorted(_folder().glob(f"greenroom-{self.engine_id}-*")):
            rank = path.name.rpartition("-")[2]
            table = np.fromfile(path, dtype=np.int64).reshape(-1, len(COUNTER_NAMES))
            for layer, row in enumerate(table):
                for name, count in zip(COUNTER_NAMES, row, strict=True):
                    families[name].add_metric((rank, str(layer)), float(count))
        return families.values()

    def remove(self) -> None:
        """Removes the files, when the engine has ended."""
        for path in _folder().glob(f"greenroom-{self.engine_id}-*"):
            path.unlink(missing_ok=True)

    def describe(self) -> Iterable[CounterMetricFamily]:
        """Nothing: several engines of a process have collectors of the same names, one after the other."""
        return ()


def serve_metrics(engine_id: str) -> None:
    """Adds an engine's counters to this process's metrics, in place of those of an engine before."""
    for collector in list(REGISTRY._collector_to_names):
        if isinstance(collector, RankCollector):
            REGISTRY.unregister(collector)
    collector = RankCollector(engine_id)
    REGISTRY.register(collector)
    atexit.register(collector.remove)  # workers that are ended by a signal leave their files


def _folder() -> Path:
    """Memory where there is such a file system."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())
