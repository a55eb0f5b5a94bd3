"""The CUDA tier on a real GPU: every lane against float64, under delays, without hidden waits."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from greenroom import hardware
from greenroom.errors import EngineError
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.cuda_tier import CudaTier
from greenroom.experts.device_ffn import can_group
from greenroom.experts.dispatch import CostModel
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.manager import OffloadManager
from greenroom.experts.native import Isa
from greenroom.experts.policies import make_policy
from greenroom.experts.store import HostStore
from greenroom.experts.ticket import Ticket
from tests.experts.driver import ALL_ON_CPU, BOTH_LANES
from tests.experts.stage import AGES
from tests.experts.tier_checks import EXPERTS, LANES, LAYERS, check_slots
from tests.reference.expert_math import moe_float64

pytestmark = pytest.mark.cuda


def make_format(dtype: torch.dtype = torch.float32, **changes) -> ExpertFormat:
    return ExpertFormat(64, 48, dtype, changes.pop("activation", Activation(ActivationKind.SILU)), **changes)


class SlowEngine(CpuExperts):
    """Starts some jobs late and ends some late, so that whoever forgets to wait reads the result of the job before."""

    def submit(self, *args, **kwargs):
        time.sleep(random.choice([0, 0, 0.002]))
        self.throttle(random.choice([1.0, 1.0, 200.0]))
        return super().submit(*args, **kwargs)


@contextmanager
def running(
    slots: int, costs: CostModel, fmt: ExpertFormat, engine: CpuExperts | None = None
) -> Iterator[OffloadManager]:
    store = HostStore([fmt] * LAYERS, [EXPERTS] * LAYERS, hardware.lock_pages, hardware.unlock_pages)
    for layer in range(LAYERS):
        for part in vars(store.views(layer)).values():
            if part is not None:
                part.copy_(torch.randn(part.shape) * 0.3)
    with engine or SlowEngine(2, None, Isa.AUTO) as engine:
        tier = CudaTier(store, [slots] * LAYERS, engine, 3, torch.device("cuda", 0))
        with OffloadManager(store, tier, [slots] * LAYERS, make_policy("lfru"), 2, 2, costs) as manager:
            yield manager


def routing(tokens: int, top_k: int) -> torch.Tensor:
    weights = 1.0 / (1 + torch.arange(EXPERTS))
    return torch.multinomial(weights.expand(tokens, -1), top_k)


def draw(fmt: ExpertFormat, tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, fmt.hidden).to(fmt.dtype), routing(tokens, top_k), torch.rand(tokens, top_k)


def run_layer(manager: OffloadManager, layer: int, tokens: int, top_k: int) -> None:
    fmt = manager.store.formats[layer]
    hidden, ids, weights = draw(fmt, tokens, top_k)
    out = manager.layers[layer].forward(hidden.cuda(), ids.cuda(), weights.cuda())
    expected = moe_float64(hidden, ids, weights, manager.store.views(layer), fmt)
    error = (out.double().cpu() - expected).norm() / expected.norm()
    assert error < (1e-5 if fmt.dtype == torch.float32 else 1e-2), error


def run_step(manager: OffloadManager, layers: int) -> None:
    with manager.step():
        for layer in range(layers):
            run_layer(manager, layer, 2, 3)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("slots", [0, 1, 4, EXPERTS])
def test_steps_under_delays(slots, lanes):
    torch.manual_seed(0)
    with running(slots, LANES[lanes], make_format()) as manager:
        tier = manager.tier
        for number in range(30):
            if number % 3 == 0:
                for stream in (tier._copies.stream, tier._write_stream):
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(random.choice([0, 2_000_000]))
            with manager.step():
                for layer in range(LAYERS):
                    run_layer(manager, layer, 1 if number % 4 else 20, 4)
            check_slots(manager)
        total = manager.counters.total()
        assert (total.hits > 0) == (slots > 0)
        assert slots == EXPERTS or total.misses > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("lanes", LANES)
def test_formats(dtype, lanes):
    torch.manual_seed(1)
    variants = [
        make_format(dtype, bias=True, activation=Activation(ActivationKind.SWIGLU_OAI, 1.702, 7.0)),
        make_format(dtype, gated=False, activation=Activation(ActivationKind.RELU2)),
        make_format(dtype, activation=Activation(ActivationKind.GELU_TANH)),
    ]
    for fmt in variants:
        with running(3, LANES[lanes], fmt) as manager:
            for tokens in (1, 17, 0, 64):
                with manager.step():
                    for layer in range(LAYERS):
                        if tokens:
                            run_layer(manager, layer, tokens, 4)
                check_slots(manager)


@pytest.mark.parametrize("slots", [0, 4])
@pytest.mark.parametrize("lanes", ["streamed", "both"])
def test_copies_ahead_of_the_routing(slots, lanes):
    """Large batches use every expert, small ones do not; layers are left out and run out of order."""
    torch.manual_seed(2)
    fmt = make_format(torch.bfloat16)
    with running(slots, LANES[lanes], fmt) as manager:
        copies, ahead, taken = manager.tier._copies, 0, 0
        for number in range(40):
            if number % 3 == 0:
                with torch.cuda.stream(copies.stream):
                    torch.cuda._sleep(random.choice([0, 2_000_000]))
            with manager.step():
                for layer in [0, 1, 2] if number % 4 else random.choices(range(LAYERS), k=5):
                    taken += bool(copies.ahead(layer))
                    run_layer(manager, layer, random.choice([1, 200, 200]), 4)
                    ahead += any(copies.ahead(following) for following in range(LAYERS))
            check_slots(manager)
        assert ahead > taken > 10


def test_complete_layers_never_wait_and_are_counted():
    """Nor in the step: torch raises at every operation that would synchronise."""
    torch.manual_seed(3)
    fmt = make_format(torch.bfloat16, bias=True, activation=Activation(ActivationKind.SWIGLU_OAI, 1.702, 7.0))
    device = torch.device("cuda", 0)
    if not can_group(fmt, EXPERTS, device):
        pytest.skip("torch's grouped GEMM would wait for the device here")
    hits = 0
    with running(EXPERTS, BOTH_LANES, fmt) as manager:
        assert all(layer.complete for layer in manager.layers)
        for tokens in (1, 300, 17):
            batches = [draw(fmt, tokens, 4) for _ in range(LAYERS)]
            on_device = [[tensor.to(device) for tensor in batch] for batch in batches]
            with manager.step():
                torch.cuda.set_sync_debug_mode("error")
                try:
                    outs = [layer.forward(*batch) for layer, batch in zip(manager.layers, on_device, strict=True)]
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            for layer, (out, (hidden, ids, weights)) in enumerate(zip(outs, batches, strict=True)):
                expected = moe_float64(hidden, ids, weights, manager.store.views(layer), fmt)
                assert (out.double().cpu() - expected).norm() < 1e-2 * expected.norm()
                hits += len(ids.unique())
            check_slots(manager)
        assert manager.counters.total().hits == hits


def test_the_compute_path_never_waits_for_the_device():
    """Apart from ``read_routing``: torch raises at every operation that would synchronise."""
    with running(4, BOTH_LANES, make_format()) as manager:
        real = manager.tier.run

        def strict(*args):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return real(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        manager.tier.run = strict
        for _ in range(6):
            with manager.step():
                for layer in range(LAYERS):
                    run_layer(manager, layer, 12, 4)
        assert manager.counters.total().streamed > 0
        assert manager.counters.total().cpu > 0


@pytest.mark.parametrize("layers", [1, 2])
def test_a_cpu_that_hangs_is_noticed_and_holds_up_nobody(layers):
    """In front of the next layer's routing, or at the step's end."""
    with running(2, ALL_ON_CPU, make_format(), CpuExperts(2, watchdog_s=0.2)) as manager:
        engine = manager.tier._engine
        run_step(manager, LAYERS)
        # There before: a copy from ordinary memory waits for the device.
        batches = [[part.cuda() for part in draw(make_format(), 20, 4)] for _ in range(layers)]

        def step() -> None:
            with manager.step():
                for layer, batch in enumerate(batches):
                    manager.layers[layer].forward(*batch)

        engine.throttle(AGES)
        with pytest.raises(EngineError, match="layer 0: the CPU engine has not got on"):
            step()
        started = time.monotonic()
        torch.cuda.synchronize()
        assert time.monotonic() - started < 5
        engine.throttle(1)
        for _ in range(3):
            run_step(manager, LAYERS)
        check_slots(manager)


def test_an_error_of_the_engine_reaches_the_caller_and_the_next_step_runs():
    with running(2, ALL_ON_CPU, make_format()) as manager:
        real, manager.tier._engine.submit = manager.tier._engine.submit, lambda *args, **named: 1 / 0
        with pytest.raises(ZeroDivisionError), manager.step():
            run_layer(manager, 0, 2, 3)
        manager.tier._engine.submit = real
        with manager.step():
            run_layer(manager, 0, 2, 3)
        check_slots(manager)


def test_page_locking():
    fmt = make_format()
    with HostStore([fmt], [4], hardware.lock_pages, hardware.unlock_pages) as store:
        assert store.locked
        assert store.blocks(0).is_pinned()
    with pytest.raises(Exception, match="page-lock"):
        hardware.lock_pages(0x1000, 4096)
    torch.zeros(4, device="cuda").sum().item()  # the failure left no error behind


def test_costs_are_measured():
    fmt = ExpertFormat(1024, 768, torch.bfloat16, Activation(ActivationKind.SILU))
    with running(2, BOTH_LANES, fmt) as manager:
        costs = manager.tier.measure_costs()
        assert 1e9 < costs.copy_bytes_per_s < 2e11
        assert costs.cpu_bytes_per_s > 1e8
        assert costs.cpu_flops_per_s > 1e9
        with manager.step():
            run_layer(manager, 0, 3, 4)


@pytest.mark.parametrize("layers", [1, 2], ids=["at the end of the step", "at the next layer"])
def test_a_failed_job_surfaces_within_its_step(layers, monkeypatch):
    """The device is let go on by the engine; the host hears of the failure where it settles the job."""
    with running(2, ALL_ON_CPU, make_format()) as manager:
        real = Ticket.wait

        def failing(ticket):
            real(ticket)
            raise EngineError("no memory")

        monkeypatch.setattr(Ticket, "wait", failing)
        with pytest.raises(EngineError, match="no memory"):
            run_step(manager, layers)
        monkeypatch.undo()
        for _ in range(3):
            run_step(manager, LAYERS)
        check_slots(manager)
