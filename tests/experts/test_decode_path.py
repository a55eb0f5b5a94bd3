"""Decode steps without the host: the kernels, the mailboxes and the CPU engine, against float64 and a plain model.

Without a GPU, Triton's interpreter runs the kernels, one program after another.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from greenroom import hardware
from greenroom.experts import expert_launches
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.cuda_tier import CudaTier
from greenroom.experts.decode_path import DecodePath
from greenroom.experts.decode_steps import DecodeSteps
from greenroom.experts.dispatch import CostModel
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.host_tier import HostTier
from greenroom.experts.mailbox import Mailboxes
from greenroom.experts.manager import OffloadManager
from greenroom.experts.policies import make_policy
from greenroom.experts.split import PARTS, SplitController
from greenroom.experts.store import HostStore
from tests.reference.expert_math import moe_float64

pytest.importorskip("triton")

from greenroom.kernels.gpu.tiling import choose_tilings
from tests.reference.interpreted import few_large_tiles

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SILU = Activation(ActivationKind.SILU)
FORMATS = {
    "bf16": ExpertFormat(64, 48, torch.bfloat16, SILU),
    "odd sizes": ExpertFormat(50, 37, torch.bfloat16, SILU),
    "clamped swiglu, biases": ExpertFormat(
        32, 40, torch.bfloat16, Activation(ActivationKind.SWIGLU_OAI, 1.7, 2.0), bias=True
    ),
    "fp16, gelu": ExpertFormat(48, 64, torch.float16, Activation(ActivationKind.GELU)),
    "fp32, tanh gelu": ExpertFormat(33, 16, torch.float32, Activation(ActivationKind.GELU_TANH)),
    "relu2, no gate": ExpertFormat(40, 24, torch.bfloat16, Activation(ActivationKind.RELU2), gated=False, bias=True),
    "relu2, clamped": ExpertFormat(40, 24, torch.float32, Activation(ActivationKind.RELU2, limit=0.5), gated=False),
}
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    few_large_tiles(monkeypatch)


@contextmanager
def decode(
    fmt: ExpertFormat, experts: int, slots: int, tokens: int, top_k: int, layers: int = 1, update: int = 2
) -> Iterator[tuple[OffloadManager, DecodeSteps]]:
    on_gpu = DEVICE.type == "cuda"
    lock = hardware.page_locks(on_gpu)
    store = HostStore([fmt] * layers, [experts] * layers, *lock)
    for layer in range(layers):
        for part in vars(store.views(layer)).values():
            if part is not None:
                part.copy_(torch.randn(part.shape) * 0.3)
    with CpuExperts(2) as engine:
        if on_gpu:
            tier = CudaTier(store, [slots] * layers, engine, 4, DEVICE)
        else:
            tier = HostTier(store, [slots] * layers, engine, 4)
        costs = CostModel(1e9, 1e9, 1e12)
        with OffloadManager(store, tier, [slots] * layers, make_policy("lfru"), top_k, update, costs) as manager:
            boxes = Mailboxes(engine, store, tokens, top_k, pin_memory=on_gpu)
            path = DecodePath(store, tier.slots, boxes, tokens, top_k, manager.places)
            try:
                yield manager, DecodeSteps(manager, path)
            finally:
                if on_gpu:
                    torch.cuda.synchronize()
                boxes.close()


def only(streamed_of_ten: int, max_experts: int) -> SplitController:
    """A split that streams so many tenths of the absent experts and never learns."""

    class Fixed(SplitController):
        def stream_parts(self) -> np.ndarray:
            return (np.arange(max_experts + 1) * streamed_of_ten // 10 * PARTS).astype(np.int32)

    return Fixed(1.0, 1.0, max_experts)


def random_batch(fmt: ExpertFormat, experts: int, tokens: int, top_k: int) -> tuple[torch.Tensor, ...]:
    hidden = torch.randn(tokens, fmt.hidden).to(fmt.dtype)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    return hidden, ids, torch.rand(tokens, top_k)


def run(steps: DecodeSteps, rows: int, layer: int, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """One step of one layer; on the host."""
    steps.begin(rows)
    out = steps.path.run(layer, *(tensor.to(DEVICE) for tensor in batch))
    steps.enqueued()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    steps.finish()
    return out.cpu()


def check(
    out: torch.Tensor, batch: tuple[torch.Tensor, ...], manager: OffloadManager, rows: int, layer: int = 0
) -> None:
    fmt = manager.store.formats[layer]
    hidden, ids, weights = batch
    expected = moe_float64(hidden[:rows], ids[:rows], weights[:rows], manager.store.views(layer), fmt)
    error = (out[:rows].double() - expected).norm() / expected.norm().clamp(min=1e-9)
    assert error < TOLERANCE[fmt.dtype]
    assert not out[rows:].any(), "rows of padding are zeros"


ALL_LANES = (5, 5)
"""Slots, and tenths of the absent experts that are streamed, with which a step has experts on every lane."""


@pytest.mark.parametrize(
    ("name", "slots", "streamed"),
    [(name, *ALL_LANES) for name in FORMATS] + [("bf16", 0, 0), ("bf16", 0, 10), ("bf16", 10, 0)],
)
@pytest.mark.parametrize("tokens", [1, 3])
def test_every_lane_equals_float64(name, tokens, slots, streamed):
    fmt = FORMATS[name]
    with decode(fmt, 10, slots, tokens, 4) as (manager, steps):
        steps.split = only(streamed, 10)
        for _ in range(3):  # the cache fills from the second step on
            batch = random_batch(fmt, 10, tokens, 4)
            check(run(steps, tokens, 0, batch), batch, manager, tokens)
            manager.check_invariants()
        total = manager.counters.total()
        assert total.streamed == 0 if streamed == 0 else total.streamed > 0
        assert (total.cpu == 0) == (streamed == 10 or slots == 10)


@pytest.mark.parametrize("name", ["bf16", "odd sizes", "clamped swiglu, biases"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_tiles_of_a_gpu_compute_the_same(name, tokens, monkeypatch):
    monkeypatch.setattr(expert_launches, "choose_tilings", choose_tilings)
    fmt = FORMATS[name]
    with decode(fmt, 6, 2, tokens, 4) as (manager, steps):
        steps.split = only(5, 6)
        batch = random_batch(fmt, 6, tokens, 4)
        check(run(steps, tokens, 0, batch), batch, manager, tokens)


class Parts(SplitController):
    """Always streams so many sixteenths, as far as there are experts."""

    def __init__(self, parts: int, max_experts: int) -> None:
        super().__init__(1.0, 1.0, max_experts)
        self._parts = np.minimum(np.arange(max_experts + 1) * PARTS, parts).astype(np.int32)

    def stream_parts(self) -> np.ndarray:
        return self._parts


DIVIDED = {
    "gated": ExpertFormat(48, 96, torch.bfloat16, SILU),
    "biases, odd width": ExpertFormat(
        40, 150, torch.float32, Activation(ActivationKind.SWIGLU_OAI, 1.7, 2.0), bias=True
    ),
    "no gate": ExpertFormat(32, 64, torch.bfloat16, Activation(ActivationKind.RELU2), gated=False, bias=True),
}


@pytest.mark.parametrize(
    ("name", "parts"),
    [("gated", parts) for parts in (0, 1, 5, 8, 15, 16, 24, 37, 64)]
    + [(name, parts) for name in ("biases, odd width", "no gate") for parts in (5, 24, 37)],
)
@pytest.mark.parametrize("tokens", [1, 3])
def test_an_expert_is_divided_between_both_sides(name, parts, tokens):
    fmt = DIVIDED[name]
    with decode(fmt, 12, 2, tokens, 4) as (manager, steps):
        steps.split = Parts(parts, 12)
        for _ in range(2):
            batch = random_batch(fmt, 12, tokens, 4)
            check(run(steps, tokens, 0, batch), batch, manager, tokens)
        _, _, on_cpu, expert, first = steps.path.record.device.counts[0, :5].tolist()
        rows = parts % PARTS * fmt.inter // PARTS // 32 * 32
        if on_cpu:
            assert steps.path.mailboxes.request[0, 1:3].tolist() == [expert, first]
        if rows and on_cpu:
            assert first == rows
            assert expert in steps.path.mailboxes.cpu_ids[0]
        else:
            assert (expert, first) == (-1, 0)


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(1, 1, 2), (6, 3, 5), (128, 8, 4), (200, 5, 2), (512, 10, 1)])
def test_any_number_of_experts_and_choices(experts, top_k, tokens):
    fmt = ExpertFormat(32, 16, torch.bfloat16, SILU)
    with decode(fmt, experts, experts // 3, tokens, top_k) as (manager, steps):
        steps.split = only(5, experts)
        for _ in range(2):
            batch = random_batch(fmt, experts, tokens, top_k)
            check(run(steps, tokens, 0, batch), batch, manager, tokens)


def test_padding_is_neither_routed_nor_counted():
    fmt = FORMATS["bf16"]
    with decode(fmt, 10, 2, 4, 3) as (manager, steps):
        steps.split = only(5, 10)
        batch = random_batch(fmt, 10, 4, 3)
        batch[1][1:] = torch.tensor([9, 8, 7])  # what only padding chooses
        batch[1][0] = torch.tensor([0, 1, 2])
        check(run(steps, 1, 0, batch), batch, manager, 1)
        steps.flush()
        assert manager.counters.total().misses == 3
        assert manager.admission.usage.total[0].nonzero()[0].tolist() == [0, 1, 2]


def test_foreign_ids_are_skipped_and_repeated_ones_count_each_time():
    fmt = FORMATS["bf16"]
    with decode(fmt, 10, 3, 3, 4) as (manager, steps):
        steps.split = only(5, 10)
        batch = random_batch(fmt, 10, 3, 4)
        batch[1][0] = torch.tensor([-1, 10, 4, 4])
        batch[1][1] = torch.tensor([-1, -1, 99, -7])
        out = run(steps, 3, 0, batch)
        check(out, batch, manager, 3)
        assert not out[1].any()


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float32])
def test_takes_ids_and_weights_as_routers_give_them(ids_dtype, weights_dtype):
    fmt = FORMATS["bf16"]
    with decode(fmt, 10, 3, 2, 4) as (manager, steps):
        hidden, ids, weights = random_batch(fmt, 10, 2, 4)
        batch = (hidden, ids.to(ids_dtype), weights.to(weights_dtype))
        check(run(steps, 2, 0, batch), batch, manager, 2)


def test_experts_with_most_tokens_are_streamed_first():
    fmt = FORMATS["bf16"]
    with decode(fmt, 10, 0, 4, 2) as (_, steps):
        steps.split = only(4, 10)
        hidden, _, weights = random_batch(fmt, 10, 4, 2)
        ids = torch.tensor([[7, 3], [7, 3], [7, 5], [1, 9]])
        run(steps, 4, 0, (hidden, ids, weights))
        on_cpu = steps.path.mailboxes.cpu_ids[0]
        # Five absent experts, two streamed: 7 with three tokens, 3 with two.
        assert on_cpu.tolist() == [[-1, -1], [-1, -1], [-1, 5], [1, 9]]


def test_counts_and_admissions_follow_the_lanes():
    fmt = FORMATS["bf16"]
    with decode(fmt, 10, 4, 1, 2) as (manager, steps):
        steps.split = only(5, 10)
        batch = random_batch(fmt, 10, 1, 2)
        for _ in range(3):
            run(steps, 1, 0, batch)
        steps.flush()
        total = manager.counters.total()
        # One lands in the first step, and is there in the second; the other one's copy begins behind the first step.
        assert (total.hits, total.streamed, total.cpu, total.admissions, total.landed) == (3, 1, 2, 1, 1)


def test_a_step_that_warms_up_teaches_nothing():
    fmt = FORMATS["bf16"]
    with decode(fmt, 10, 4, 1, 2) as (manager, steps):
        steps.begin(1)
        steps.path.run(0, *(tensor.to(DEVICE) for tensor in random_batch(fmt, 10, 1, 2)))
        steps.enqueued()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        steps.finish(learn=False)
        steps.flush()
        assert manager.counters.total().misses == 0
        assert not manager.admission.usage.total.any()


def test_a_batch_that_is_too_large_is_refused():
    fmt = FORMATS["bf16"]
    with decode(fmt, 10, 4, 2, 2) as (_, steps):
        batch = random_batch(fmt, 10, 3, 2)
        with pytest.raises(ValueError, match="2"):
            steps.path.run(0, *(tensor.to(DEVICE) for tensor in batch))


def test_nobody_waits_for_a_layer_whose_experts_all_have_slots(monkeypatch):
    waits = []
    monkeypatch.setattr("greenroom.experts.decode_path.wait_until_one", lambda done, *_: waits.append(int(done)))
    with decode(FORMATS["bf16"], 10, 10, 1, 4) as (manager, steps):
        batch = random_batch(FORMATS["bf16"], 10, 1, 4)
        check(run(steps, 1, 0, batch), batch, manager, 1)
        steps.flush()
        assert waits == []
        assert not steps.path.mailboxes.done.any()
        assert manager.counters.total().hits == 4


@pytest.mark.parametrize(("slots", "armed"), [(10, 0), (9, 1)])
def test_the_engine_looks_for_requests_only_where_some_may_come(monkeypatch, slots, armed):
    calls = []
    with decode(FORMATS["bf16"], 10, slots, 1, 4) as (_, steps):
        monkeypatch.setattr(steps.path.mailboxes, "arm", lambda: calls.append(1))
        steps.begin(1)
        steps.enqueued()
        steps.finish(learn=False)
    assert len(calls) == armed
