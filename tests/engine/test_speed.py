"""Predicted speed against everything that was measured on GPUs, each with the bandwidths of its own process.

The shape is Qwen3-30B-A3B's with 12 of its 48 layers; figures: docs/performance.md and docs/measurements.md.
"""

import dataclasses
from dataclasses import dataclass, field

import pytest
import torch

from greenroom.bench.shapes import shape_config
from greenroom.config import OffloadConfig
from greenroom.engine.model_shape import ModelShape, probe_shape
from greenroom.engine.request import Request
from greenroom.engine.speed import Crossing, Rates, pass_time
from greenroom.weights.schedule import bytes_beside_experts
from greenroom.weights.select import Selection

ATTENTION = {"weights_offload_params": "self_attn"}


def h100(cpu: float, pcie: float) -> Rates:
    """One 80 GB HBM3; CPU and PCIe at once, GB/s."""
    return Rates(cpu, 4.4, pcie, dense_gb_s=3000, dense_tflop_s=500)


def h200(cpu: float, pcie: float) -> Rates:
    return Rates(cpu, 4.4, pcie, dense_gb_s=4300, dense_tflop_s=600)


@dataclass(frozen=True)
class Anchor:
    """A measured speed in tok/s. hit_rate: as measured, with ``top_k`` choices a token."""

    rates: Rates
    tok_s: float
    tokens: int = 1
    sequences: int = 1
    cached: int = 0
    hit_rate: float | None = None
    top_k: int = 8
    weights: dict[str, object] = field(default_factory=dict)


ANCHORS = {
    "H100, one sequence": Anchor(h100(67.4, 41.0), 103.2),
    "H100, one sequence, another process": Anchor(h100(88.7, 41.3), 120.1),
    "H100, 16 sequences": Anchor(h100(81.7, 45.1), 224.1, 16, 16),
    "H100, 16 sequences, another process": Anchor(h100(81.7, 45.1), 242.3, 16, 16),
    "H100, everything cached": Anchor(h100(67.4, 41.0), 568.6, cached=128),
    "H100, trace, 41% hits": Anchor(h100(76, 43.5), 187, cached=32, hit_rate=0.41, top_k=6),
    "H100, prompt of 128": Anchor(h100(76, 49.1), 944, 128),
    "H100, prompt of 512, slow lanes": Anchor(h100(67, 41), 3817, 512),
    "H100, prompt of 512, fast lanes": Anchor(h100(86, 46), 3817, 512),
    "H100, prompt of 512, before": Anchor(h100(76, 49.1), 3693, 512),
    "H100, prompt of 1024": Anchor(h100(76, 49.1), 5977, 1024),
    "H100, prompt of 3900, slow lanes": Anchor(h100(67, 41), 16111, 3900),
    "H100, prompt of 3900, fast lanes": Anchor(h100(86, 46), 16111, 3900),
    "H100, prompt of 8192": Anchor(h100(76, 49.1), 28423, 8192),
    "H200, one sequence": Anchor(h200(88.2, 46.4), 135.3),
    "H200, one sequence, slower steps": Anchor(h200(90.6, 47.4), 123.1),
    "H200, 16 sequences": Anchor(h200(89.6, 47.4), 235.0, 16, 16),
    "H200, everything cached": Anchor(h200(83.4, 49.1), 726.3, cached=128),
    "H200, everything cached, in a server": Anchor(h200(81.3, 46.4), 661.8, cached=128),
    "H200, trace, 69% hits": Anchor(h200(81.0, 47.4), 292.9, cached=32, hit_rate=0.69, top_k=6),
    "H200, prompt of 512": Anchor(h200(84.3, 47.6), 4141, 512),
    "H200, prompt of 2048, in a server": Anchor(h200(81.3, 46.4), 10957, 2048),
    "H200, prompt of 3900": Anchor(h200(93.9, 49.2), 17688, 3900),
    "H200, slow host, one sequence": Anchor(h200(62.7, 40.6), 111.0),
    "H200, slow host, 16 sequences": Anchor(h200(62.7, 40.6), 172.6, 16, 16),
    "H200, one sequence, later": Anchor(h200(81.2, 46.0), 118.5),
    "H200, one sequence, fastest": Anchor(h200(76.5, 44.9), 130.9),
    "H200, 16 sequences, in a server": Anchor(h200(97.8, 49.8), 202.0, 16, 16),
    "H200, everything cached, fewer waits": Anchor(h200(71.2, 40.4), 757.9, cached=128),
    "H200, trace, 74% hits": Anchor(h200(68.6, 41.0), 320.4, cached=32, hit_rate=0.74, top_k=6),
    "H200, prompt of 512, later": Anchor(h200(78.6, 42.8), 4111, 512),
    "H200, prompt of 3900, later": Anchor(h200(78.6, 42.8), 17861, 3900),
    "H200, prompt of 512, everything cached": Anchor(h200(86.6, 45.8), 20944, 512, cached=128),
    "H200, prompt of 3900, everything cached": Anchor(h200(86.6, 45.8), 122598, 3900, cached=128),
    "H200, one sequence, steps ahead": Anchor(h200(82.8, 45.8), 135.7),
    "H200, 16 sequences, steps ahead": Anchor(h200(82.8, 45.8), 201.6, 16, 16),
    "H200, everything cached, steps ahead": Anchor(h200(79.6, 45.1), 959.5, cached=128),
    "H200, trace, 74% hits, steps ahead": Anchor(h200(84.8, 47.5), 358.0, cached=32, hit_rate=0.74, top_k=6),
    "H200, all attention, prefetched": Anchor(
        h200(93.5, 46.0), 94.2, weights=ATTENTION | {"weights_offload_group_size": 1}
    ),
    "H200, one of four layers' attention": Anchor(
        h200(88.2, 46.4), 102.8, weights=ATTENTION | {"weights_offload_group_size": 4}
    ),
    "H200, all attention, prefetched without spreading": Anchor(
        h200(88.2, 46.4), 71.9, weights=ATTENTION | {"weights_offload_group_size": 1}
    ),
    "H200, all attention, read in place": Anchor(
        h200(88.2, 46.4), 56.8, weights=ATTENTION | {"weights_offload_backend": "uva"}
    ),
}


@pytest.fixture(scope="module")
def q30() -> ModelShape:
    return probe_shape(shape_config("q30-12L"), torch.bfloat16)


def selection(shape: ModelShape, **weights) -> Selection:
    return Request.check(OffloadConfig(device="cpu", **weights)).select(shape.spec)


@pytest.mark.parametrize("name", ANCHORS)
def test_within_a_quarter_of_what_was_measured(q30, name):
    anchor = ANCHORS[name]
    shape = dataclasses.replace(q30, top_k=(anchor.top_k,) * 12)
    crossing = Crossing.of(selection(shape, **anchor.weights))
    slots = (anchor.cached,) * 12
    seconds = pass_time(shape, slots, anchor.rates, anchor.tokens, anchor.sequences, anchor.hit_rate, crossing).total
    assert anchor.tokens / seconds == pytest.approx(anchor.tok_s, rel=0.25)


def test_weights_beside_experts_and_alone(q30):
    """The same bytes cost least where they share the link with experts that the CPU can take."""
    rates, size = h200(88.2, 46.4), 12 * 37_749_248

    def seconds(crossing: Crossing) -> float:
        return pass_time(q30, (0,) * 12, rates, 1, 1, None, crossing).total

    none, beside, alone = (seconds(Crossing(*split)) for split in ((0, 0), (size, 0), (0, size)))
    assert beside - none == pytest.approx(size / (88.2e9 + 46.4e9), rel=1e-6)
    assert alone - none == pytest.approx(size / 46.4e9, rel=1e-6)
    huge = 12 * 1_000_000_000
    assert seconds(Crossing(huge, 0)) == pytest.approx(seconds(Crossing()) - 12 * 8 * 9437184 / 134.6e9 + huge / 46.4e9)


@pytest.mark.parametrize(
    "weights",
    [{}, {"weights_offload_group_size": 1}, ATTENTION | {"weights_offload_group_size": 3}],
)
def test_nothing_that_crosses_is_lost(q30, weights):
    chosen = selection(q30, **weights)
    crossing = Crossing.of(chosen)
    assert crossing.beside + crossing.alone == chosen.pass_bytes
    assert crossing.beside == bytes_beside_experts(chosen)
