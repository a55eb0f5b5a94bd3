"""Layers whose every expert has a slot: the host decides nothing, and still counts everything. On a played device."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from greenroom.experts import cuda_tier
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.cuda_tier import CudaTier
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.manager import OffloadManager
from greenroom.experts.policies import make_policy
from greenroom.experts.store import HostStore
from greenroom.experts.tier import DeviceTier
from tests.experts.driver import BOTH_LANES
from tests.experts.stage import filled
from tests.experts.tier_checks import EXPERTS, LAYERS, check_slots
from tests.reference.expert_math import moe_float64
from tests.reference.played_cuda import play_cuda

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, kernels do not run on a played one")

TOP_K, CACHE_TOPK = 4, 2
FORMAT = ExpertFormat(16, 24, torch.bfloat16, Activation(ActivationKind.SILU), bias=True)
MIXED = [EXPERTS, 4, EXPERTS]


@dataclass
class Expected:
    """What a brute-force count of the same routing comes to."""

    hits: np.ndarray = field(default_factory=lambda: np.zeros(LAYERS, dtype=np.int64))
    total: np.ndarray = field(default_factory=lambda: np.zeros((LAYERS, EXPERTS)))

    def add(self, layer: int, ids: torch.Tensor, weights: torch.Tensor, valid: np.ndarray | None) -> None:
        rows = [row for row in range(len(ids)) if valid is None or valid[row]]
        self.hits[layer] += len(set(ids.flatten().tolist()) & set(range(EXPERTS)))
        share = np.zeros(EXPERTS)
        for row in rows:
            leading = sorted(range(TOP_K), key=lambda k: -weights[row, k].item())[:CACHE_TOPK]
            for expert in ids[row, leading].tolist():
                if 0 <= expert < EXPERTS:
                    share[expert] += 1 / len(rows)
        self.total[layer] += share.clip(max=1)


@contextmanager
def running(patch: pytest.MonkeyPatch, slots: list[int]) -> Iterator[OffloadManager]:
    device = play_cuda(patch)
    patch.setattr(cuda_tier, "can_group", lambda _fmt, _experts, _device: True)
    store = filled(HostStore([FORMAT] * LAYERS, [EXPERTS] * LAYERS))
    with CpuExperts(2) as engine:
        tier = CudaTier(store, slots, engine, 3, device)
        with OffloadManager(store, tier, slots, make_policy("lfru"), CACHE_TOPK, 2, BOTH_LANES) as manager:
            yield manager


def run_layer(manager: OffloadManager, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some choices belong to other ranks. The routing of the layer."""
    hidden = torch.randn(tokens, FORMAT.hidden).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS + 2)[:TOP_K] - 1 for _ in range(tokens)])
    weights = torch.rand(tokens, TOP_K).bfloat16()
    out = manager.layers[layer].forward(hidden, ids, weights)
    here = torch.where(ids < EXPERTS, ids, -1)
    expected = moe_float64(hidden, here, weights, manager.store.views(layer), FORMAT)
    assert out.dtype == hidden.dtype
    assert (out.double() - expected).norm() < 1e-2 * expected.norm()
    return ids, weights


@pytest.mark.parametrize("slots", [[EXPERTS] * LAYERS, MIXED], ids=["all", "some"])
def test_all_is_counted(slots: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with running(monkeypatch, slots) as manager:
        assert [layer.complete for layer in manager.layers] == [count == EXPERTS for count in slots]
        expected = Expected()
        for number, tokens in enumerate((9, 1, 5, 9)):
            valid = None if number % 2 else np.arange(tokens) != 3
            with manager.step(valid):
                for layer in range(LAYERS):
                    expected.add(layer, *run_layer(manager, layer, tokens), valid)
            check_slots(manager)
        for layer, counts in enumerate(manager.counters.layers()):
            assert counts.hits + counts.misses == expected.hits[layer]
            assert manager.layers[layer].complete == (counts.misses == 0)
            assert counts.evictions == 0 or not manager.layers[layer].complete
        np.testing.assert_allclose(manager.admission.usage.total, expected.total)


def test_the_host_reads_no_routing_within_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(monkeypatch, [EXPERTS] * LAYERS) as manager:
        for name in ("read_routing", "lanes", "run"):
            monkeypatch.setattr(manager.tier, name, lambda *_: pytest.fail("the host decides"))
        with manager.step():
            run_layer(manager, 0, 3)
            assert manager.counters.total().hits == 0
        assert manager.counters.total().hits > 0


def test_steps_that_do_not_count_leave_nothing_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        with manager.step():
            run_layer(manager, 0, 5)
            raise MemoryError

    with running(monkeypatch, [EXPERTS] * LAYERS) as manager:
        with manager.warm_up(), manager.step():
            run_layer(manager, 1, 5)
        with pytest.raises(MemoryError):
            fail()
        expected = Expected()
        with manager.step():
            expected.add(2, *run_layer(manager, 2, 5), None)
        assert [layer.hits for layer in manager.counters.layers()] == expected.hits.tolist()
        np.testing.assert_allclose(manager.admission.usage.total, expected.total)


def test_outside_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(monkeypatch, [EXPERTS] * LAYERS) as manager, pytest.raises(RuntimeError, match="outside a step"):
        run_layer(manager, 0, 5)


def test_a_tier_that_does_not_take_them_decides_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(monkeypatch, [EXPERTS] * LAYERS) as manager:
        monkeypatch.setattr(CudaTier, "takes_complete", DeviceTier.takes_complete)
        other = type(manager.layers[0])(
            0, FORMAT, EXPERTS, manager.tier, manager.cache, manager.costs, manager.expect_step, manager.record
        )
        manager.layers[0] = other
        assert not other.complete
        with manager.step():
            ids, _ = run_layer(manager, 0, 5)
            assert manager.counters.total().hits == len(set(ids.flatten().tolist()) & set(range(EXPERTS)))
