"""The CUDA tier on a device that the CPU plays: every lane against float64, failures, and a CPU engine that hangs."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from greenroom.errors import EngineError
from greenroom.experts import open_job
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.cuda_tier import CudaTier
from greenroom.experts.dispatch import CostModel
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.manager import OffloadManager
from greenroom.experts.policies import make_policy
from greenroom.experts.store import HostStore
from tests.experts.driver import ALL_ON_CPU
from tests.experts.stage import AGES, filled
from tests.experts.tier_checks import EXPERTS, LANES, LAYERS, check_slots
from tests.reference.expert_math import moe_float64
from tests.reference.played_cuda import play_cuda

TOP_K = 4
FORMAT = ExpertFormat(64, 48, torch.float32, Activation(ActivationKind.SILU), bias=True)


@contextmanager
def running(
    patch: pytest.MonkeyPatch, slots: int, costs: CostModel, watchdog_s: float = 60.0
) -> Iterator[tuple[OffloadManager, CpuExperts]]:
    device = play_cuda(patch)
    store = filled(HostStore([FORMAT] * LAYERS, [EXPERTS] * LAYERS))
    with CpuExperts(2, watchdog_s=watchdog_s) as engine:
        tier = CudaTier(store, [slots] * LAYERS, engine, 3, device)
        policy = make_policy("lfru")
        with OffloadManager(store, tier, [slots] * LAYERS, policy, TOP_K, 2, costs) as manager:
            yield manager, engine


def run_step(manager: OffloadManager, tokens: int, hangs: bool = False) -> None:
    with manager.step():
        for layer in range(LAYERS):
            hidden, ids = torch.randn(tokens, FORMAT.hidden), torch.randint(0, EXPERTS, (tokens, TOP_K))
            weights = torch.rand(tokens, TOP_K)
            out = manager.layers[layer].forward(hidden, ids, weights)
            if not hangs:
                expected = moe_float64(hidden, ids, weights, manager.store.views(layer), FORMAT)
                torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    check_slots(manager)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("slots", [0, 1, 4, EXPERTS])
def test_steps(slots: int, lanes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    with running(monkeypatch, slots, LANES[lanes]) as (manager, _engine):
        for number in range(15):
            run_step(manager, 1 if number % 3 else 20)
        total = manager.counters.total()
        assert (total.hits > 0) == (slots > 0)
        assert (total.misses == 0) == (slots == EXPERTS)
        if slots < EXPERTS:
            assert (total.streamed > 0) == (lanes != "cpu")
            assert (total.cpu > 0) == (lanes != "streamed")


def test_a_cpu_that_hangs_is_noticed_in_front_of_the_next_layers_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(monkeypatch, 2, ALL_ON_CPU, watchdog_s=0.2) as (manager, engine):
        run_step(manager, 20)
        engine.throttle(AGES)
        with pytest.raises(EngineError, match="layer 0: the CPU engine has not got on"):
            run_step(manager, 20, hangs=True)
        engine.throttle(1)
        for _ in range(3):
            run_step(manager, 20)


def test_a_step_that_fails_while_the_cpu_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_job, "_ABANDON_S", 0.1)
    with running(monkeypatch, 2, ALL_ON_CPU) as (manager, engine):

        def fail() -> None:
            with manager.step():
                manager.layers[0].forward(torch.randn(20, 64), torch.ones(20, TOP_K).int(), torch.ones(20, TOP_K))
                raise MemoryError

        engine.throttle(AGES)
        with pytest.raises(MemoryError):
            fail()
        engine.throttle(1)
        for _ in range(3):
            run_step(manager, 20)
