"""What every benchmark's result says; each adds what is its own."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from greenroom.bench.commit import commit_hash

if TYPE_CHECKING:  # what benchmarks of parts do without
    from greenroom.engine.offload import Offload


def cpu_name() -> str:
    """The processor's model name as Linux gives it, or "unknown"."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return "unknown"


def gpu_name(device: torch.device) -> str | None:
    """None unless ``device`` is a GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """One figure, and what it was measured with.

    bench: which benchmark. shape: what it ran on, by name or in words; None where there is one only.
    value: the figure, in ``unit``. bound: what it would be at best, in the same unit; None without such a thing.
    repeats: timed runs, of which ``value`` is the median.
    device: what ran it. gpu: its name, None unless one took part. cpu: the processor's name.
    """

    bench: str
    shape: str | None = None
    value: float
    unit: str
    bound: float | None = None
    repeats: int
    device: str
    gpu: str | None = None
    cpu: str = field(default_factory=cpu_name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, with the commit that they were measured with."""
        return {**asdict(self), "commit": commit_hash()}


@dataclass(frozen=True, kw_only=True)
class LayersResult(BenchResult):
    """Of layers whose experts are offloaded.

    batch: sequences. tokens: of each. cache_expert_num: cache slots a layer. routing: how experts were chosen.
    threads, isa: of the CPU engine.
    """

    batch: int
    tokens: int
    cache_expert_num: int
    routing: str
    threads: int
    isa: str


def offload_labels(offload: "Offload") -> dict[str, Any]:
    """The fields of a ``LayersResult`` that a model's offload knows."""
    return {
        "cache_expert_num": max(offload.plan.num_slots),
        "threads": offload.engine.threads,
        "isa": offload.engine.isa.label,
        "device": str(offload.device),
        "gpu": gpu_name(offload.device),
    }
