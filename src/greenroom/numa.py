"""NUMA nodes: which cores belong to which, and memory that lies where it is read.

A page lies on the node of the core that writes it first. That needs no privileges, unlike a memory policy, which
containers mostly forbid.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from greenroom import hardware

_NODES = Path("/sys/devices/system/node")

STRETCH = 2 << 20
"""Bytes of one node before those of the next: a huge page. So a node has its share of each expert."""


def node_cores(root: Path = _NODES) -> list[list[int]]:
    """Cores of each NUMA node by its number; empty where the system does not say."""
    found = {int(path.name[4:]): parse_cores((path / "cpulist").read_text()) for path in root.glob("node[0-9]*")}
    return [found.get(number, []) for number in range(max(found, default=-1) + 1)]


def parse_cores(text: str) -> list[int]:
    """``"0-3,8"`` as [0, 1, 2, 3, 8]."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def homes(cores: Sequence[int], nodes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Those of ``cores`` on each node that has any; empty on a machine with one node, where there is no choice.

    Args:
        nodes: cores of each node.
    """
    if sum(bool(node) for node in nodes) < 2:
        return []
    return [local for node in nodes if (local := sorted({*cores} & {*node}))]


def engine_homes() -> list[list[int]]:
    """``homes`` of all cores that this process may use: where memory that its CPU engine reads should lie."""
    return homes(hardware.usable_cores(), node_cores())


def place(memory: torch.Tensor, by_node: Sequence[Sequence[int]]) -> None:
    """Makes pages exist, in turns on the nodes of these cores; where a thread may not move, on the one it is on.

    Args:
        memory: uint8 [n] that nobody has written yet; zeros afterwards.
        by_node: cores of this process, as ``homes`` groups them; at least one group.
    """
    pages = memory.numpy()
    for number, cores in enumerate(by_node):
        with _on(cores):
            for first in range(number * STRETCH, len(pages), len(by_node) * STRETCH):
                # By this thread, and none of torch's.
                pages[first : first + STRETCH : mmap.PAGESIZE] = 0


@contextmanager
def _on(cores: Sequence[int]) -> Iterator[None]:
    """Inside, the calling thread runs on ``cores`` only, if it may."""
    before = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)
