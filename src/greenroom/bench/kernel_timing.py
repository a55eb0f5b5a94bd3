"""Launches of one GPU kernel, and how long they take by the device's clock."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MOST_LAUNCHES = 100
"""Of a graph."""

REPEATS = 11

_FEWEST_LAUNCHES = 12
_GRAPH_BYTES = 4 << 30
"""What a graph's launches read, about, if that lets it have so many."""

_COPY_BYTES = {"hbm": 1 << 30, "pcie": 256 << 20}
_HEAD_START_CYCLES = 500_000
"""What the device is kept busy with while a graph's launch is under way."""

Launch = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """Launches of one kernel that do the same to different memory.

    experts: of a launch. nbytes: read and written by each. limit: what bounds it, "hbm" or "pcie". memory: what
    launches know the addresses of, and nothing else keeps.
    """

    kernel: str
    shape: str
    tokens: int
    experts: int
    launches: Sequence[Launch]
    nbytes: int | None = None
    limit: str | None = None
    memory: torch.Tensor | None = None


def time_launches(launches: Sequence[Launch], nbytes: int | None) -> tuple[float, int]:
    """(median microseconds a launch, launches of a graph), by the device's clock.

    Args:
        launches: taken in turn.
        nbytes: of one of them; large ones are launched fewer times.
    """
    count = max(_FEWEST_LAUNCHES, min(MOST_LAUNCHES, _GRAPH_BYTES // nbytes if nbytes else MOST_LAUNCHES))
    for launch in launches:
        launch()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Kept, so that each launch writes to memory of its own too.
        results = [launches[number % len(launches)]() for number in range(count)]
    graph.replay()
    torch.cuda.synchronize()
    milliseconds = [_device_milliseconds(graph.replay) for _ in range(REPEATS)]
    del results
    return statistics.median(milliseconds) * 1e3 / count, count


def _device_milliseconds(work: Launch) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # By the time the device gets to the events all of the work is in its queue.
    torch.cuda._sleep(_HEAD_START_CYCLES)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def copy_rate(limit: str, device: torch.device) -> float:
    """GB/s of a large copy: on the device ("hbm"), where each byte counts twice, or to it ("pcie")."""
    size, on_device = _COPY_BYTES[limit], limit == "hbm"
    target = torch.empty(size, dtype=torch.uint8, device=device)
    if on_device:
        source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    else:
        source = torch.randint(256, (size,), dtype=torch.uint8).pin_memory()
    times = [_device_milliseconds(lambda: target.copy_(source, non_blocking=True)) for _ in range(REPEATS + 1)][1:]
    return size * (2 if on_device else 1) / statistics.median(times) / 1e6
