"""How fast a machine will run a model: a small model of the time of a pass. Pure.

A layer's missing experts take both lanes at once, CPU and PCIe, which end together; its resident ones are read from
device memory; whatever else it does is a fixed time. Decode is the bare step: what a server does between two steps,
choosing tokens above all, comes on top. Constants are fitted to the machines of docs/performance.md.
"""

from dataclasses import dataclass

import numpy as np

from greenroom.engine.model_shape import ModelShape
from greenroom.errors import ConfigError
from greenroom.experts.formats import ExpertFormat
from greenroom.weights.schedule import bytes_beside_experts
from greenroom.weights.select import Selection

_STEP_S = 100e-6
"""Of a decode step on a GPU, outside of its layers: embedding, choice, and what the host does while nothing runs. Less
where a step is enqueued while the one before runs, more in a server."""

_LAYER_S = 60e-6
"""Of a layer of a captured step, beside bytes of experts and attention: some twenty kernels that move next to nothing,
and what experts' kernels take beyond the memory's rate."""

_EAGER_LAYER_S = 4e-3
"""Of a layer of a step that no graph holds: the host launches each kernel and decides where experts run."""

_PREFILL_LAYER_S = 1.8e-3
"""Of a layer of a prefill on a GPU, where the lanes wait for the routing and for launches."""

_PREFILL_HOST_S = 3.3e-3
"""What the host takes at least for a layer of a prefill on a GPU, however little is missing."""

_COMPLETE_HOST_S = 2e-3
"""The same where every expert has a slot, so that the host does not wait for the routing."""

_HOST_LAYER_S = 1.5e-3
"""Of a layer without a GPU: what is not bytes on two slow cores, Python above all. A rough figure."""

_HIT_SHARES, _HIT_RATES = (0.0, 0.125, 0.25, 1.0), (0.0, 0.62, 0.77, 1.0)
"""Share of a layer's experts that is cached, and hit rate at one sequence: the mean of three recorded models."""


_MOST_GB_S = 100_000
"""No memory is that fast: whoever says more has another unit in mind."""


@dataclass(frozen=True)
class Rates:
    """What a machine gives. 1 GB is 10^9 bytes.

    Attributes:
        cpu_gb_s: expert weights that the CPU engine reads, beside copies if there is a GPU.
        cpu_tflop_s: of the CPU engine, when an expert has many tokens.
        pcie_gb_s: copies of experts to the GPU, beside the CPU engine. None without one.
        dense_gb_s, dense_tflop_s: other weights, and products of large matrices, where the rest of the model runs.
        source: where these come from, in words.
    """

    cpu_gb_s: float
    cpu_tflop_s: float
    pcie_gb_s: float | None
    dense_gb_s: float
    dense_tflop_s: float
    source: str = "given"

    def __post_init__(self) -> None:
        for name in ("cpu_gb_s", "cpu_tflop_s", "pcie_gb_s", "dense_gb_s", "dense_tflop_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be more than 0, not {value}")
            if name.endswith("_gb_s") and value is not None and value > _MOST_GB_S:
                raise ConfigError(f"{name} is in GB/s, like 80; {value:g} would be bytes")


@dataclass(frozen=True)
class Crossing:
    """Bytes of offloaded weights that cross PCIe in a pass, ``beside`` experts or ``alone`` while nothing else runs."""

    beside: float = 0.0
    alone: float = 0.0

    @classmethod
    def of(cls, selection: Selection) -> "Crossing":
        """What ``selection`` sends."""
        beside = bytes_beside_experts(selection)
        return cls(beside, selection.pass_bytes - beside)


_NOTHING = Crossing()


@dataclass(frozen=True)
class PassTime:
    """Seconds of one pass. layers: all of them; rest: head, launch and the like."""

    layers: float
    rest: float

    @property
    def total(self) -> float:
        """Of the pass."""
        return self.layers + self.rest


def assumed_hit_rate(share: float) -> float:
    """Share of needed experts that have a slot, of one sequence, if ``share`` of all experts have."""
    return float(np.interp(share, _HIT_SHARES, _HIT_RATES))


def distinct_experts(tokens: int, top_k: int, num_experts: int) -> float:
    """Experts that ``tokens`` need together, if each draws at random."""
    return float(num_experts * (1 - (1 - min(top_k / num_experts, 1.0)) ** tokens))


def pass_time(
    shape: ModelShape,
    num_slots: tuple[int, ...],
    rates: Rates,
    tokens: int,
    sequences: int,
    hit_rate: float | None = None,
    crossing: Crossing = _NOTHING,
) -> PassTime:
    """
    Args:
        num_slots: of each expert layer.
        tokens: of the pass; a decode step has one a sequence.
        sequences: whose next tokens it computes.
        hit_rate: of one sequence's decode; None assumes one.
        crossing: of other weights that are offloaded.
    """
    decode = tokens == sequences
    on_gpu = rates.pcie_gb_s is not None
    per_layer = crossing.beside / len(shape.spec.layers) if on_gpu else 0.0
    layers = crossing.alone / (rates.pcie_gb_s * 1e9) if rates.pcie_gb_s is not None else 0.0
    for layer, top_k, slots in zip(shape.spec.layers, shape.top_k, num_slots, strict=True):
        needed = distinct_experts(tokens, top_k, layer.num_experts)
        share = slots / layer.num_experts
        hits = _hit_rate(share, needed, top_k, layer.num_experts, hit_rate) if on_gpu else 0.0
        rows = tokens * top_k / needed
        experts = _missing_seconds(layer.format, needed * (1 - hits), rows, rates, per_layer)
        experts += needed * hits * layer.format.block_bytes / (rates.dense_gb_s * 1e9)
        host = _COMPLETE_HOST_S if slots == layer.num_experts else _PREFILL_HOST_S
        layers += experts if decode or not on_gpu else max(experts, host - _PREFILL_LAYER_S)
    layers += shape.num_layers * _layer_overhead(shape, decode, on_gpu)
    # A pass reads every weight once; with many tokens arithmetic takes longer than that.
    read = shape.dense_bytes / (rates.dense_gb_s * 1e9)
    compute = 2 * tokens * shape.layer_weights / (rates.dense_tflop_s * 1e12)
    return PassTime(layers, max(read, compute) + (_STEP_S if on_gpu else 0.0))


def _hit_rate(share: float, needed: float, top_k: int, num_experts: int, given: float | None) -> float:
    """Of the experts that a pass needs. The more of a layer it needs, the closer to the share that is cached."""
    if share >= 1:
        return 1.0
    if share == 0:
        return 0.0
    single = assumed_hit_rate(share) if given is None else given
    if num_experts <= top_k:
        return share
    spread = min(1.0, max(0.0, (needed - top_k) / (num_experts - top_k)))
    return single + (share - single) * spread


def _missing_seconds(fmt: ExpertFormat, missing: float, rows: float, rates: Rates, weight_bytes: float) -> float:
    """Until both lanes have done ``missing`` experts of ``rows`` tokens each; other weights cross PCIe before them."""
    flop = 2 * rows * fmt.hidden * fmt.inter * (3 if fmt.gated else 2)
    cpu = max(fmt.block_bytes / (rates.cpu_gb_s * 1e9), flop / (rates.cpu_tflop_s * 1e12))
    if rates.pcie_gb_s is None:
        return missing * cpu
    copy = fmt.block_bytes / (rates.pcie_gb_s * 1e9)
    head_start = weight_bytes / (rates.pcie_gb_s * 1e9)
    return max(head_start, (missing + head_start / copy) / (1 / cpu + 1 / copy))


def _layer_overhead(shape: ModelShape, decode: bool, on_gpu: bool) -> float:
    if not on_gpu:
        return _HOST_LAYER_S
    if not decode:
        return _PREFILL_LAYER_S
    return _EAGER_LAYER_S if shape.has_states else _LAYER_S
