"""Which cores a rank's CPU engine uses. Pure, but for what ``Share.of`` reads from the machine."""

from dataclasses import dataclass
from pathlib import Path

from greenroom import hardware, numa

_PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Share:
    """What a rank has to divide with the other ranks of its machine.

    Attributes:
        index, count: this rank is number ``index`` of ``count`` on the machine.
        beside_gpu: a core is left to the thread that feeds the GPU.
        node: NUMA node of each rank's GPU, by index; None where it is not known.
    """

    index: int
    count: int
    beside_gpu: bool
    nodes: tuple[int | None, ...] = ()


def rank_cores(threads: int | None, share: Share) -> tuple[int, list[int] | None]:
    """Number of threads for a rank and the cores to pin them to (None: not pinned).

    Args:
        threads: what was asked for, or None.
    """
    own = _own_cores(share)
    if threads is None:
        threads = max(1, len(own) - 1) if share.beside_gpu else len(own)
    return threads, own[len(own) - threads :] if threads <= len(own) and hardware.may_pin() else None


def rank_homes(share: Share) -> list[list[int]]:
    """A rank's cores by NUMA node, for its memory to lie there; empty where there is no choice."""
    return numa.homes(_own_cores(share), numa.node_cores())


def _own_cores(share: Share) -> list[int]:
    return divide_cores(hardware.usable_cores(), numa.node_cores(), share)


def divide_cores(cores: list[int], nodes: list[list[int]], share: Share) -> list[int]:
    """This rank's part of the usable ``cores``, on the NUMA node of its GPU where that is known and has some.

    Ranks of one node share its cores; where nodes are unknown, or a node has fewer cores than ranks, all ranks share
    all cores. At least one core.

    Args:
        nodes: cores of each NUMA node.
    """
    node = share.nodes[share.index] if share.index < len(share.nodes) else None
    if node is not None and node < len(nodes) and None not in share.nodes:
        local = [core for core in cores if core in set(nodes[node])]
        ranks = [index for index in range(share.count) if share.nodes[index] == node]
        if len(local) >= len(ranks):
            return _part(local, ranks.index(share.index), len(ranks))
    return _part(cores, share.index, share.count)


def gpu_node(pci_address: str, root: Path = _PCI) -> int | None:
    """NUMA node of the GPU at ``pci_address`` ("0000:3b:00.0"); None where the system does not say."""
    try:
        node = int((root / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _part(cores: list[int], index: int, count: int) -> list[int]:
    """Part ``index`` of ``count`` neighbouring parts of nearly the same size; ranks share where there are too few."""
    if len(cores) < count:
        return [cores[index % len(cores)]]
    return cores[len(cores) * index // count : len(cores) * (index + 1) // count]
