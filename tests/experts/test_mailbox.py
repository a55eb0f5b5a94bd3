"""Mailboxes of the CPU engine: what a device posts is computed, nothing is lost, nobody hangs."""

import math
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from greenroom.errors import EngineError
from greenroom.experts.cpu import CpuExperts, Isa, supported_isas
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.mailbox import Mailboxes
from greenroom.experts.store import HostStore
from tests.reference.expert_math import moe_float64
from tests.reference.posting_device import PostingDevice

SILU = Activation(ActivationKind.SILU)
SMALL = ExpertFormat(33, 17, torch.bfloat16, SILU)
WIDE = ExpertFormat(512, 256, torch.bfloat16, SILU)
SLOW = ExpertFormat(1024, 512, torch.float32, SILU)
EXPERTS = 5


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """torch's own threads would only be in the engine's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def filled(store: HostStore) -> HostStore:
    generator = torch.Generator().manual_seed(1)
    for layer, fmt in enumerate(store.formats):
        views = store.views(layer)
        for part, width in ((views.up, fmt.hidden), (views.down, fmt.inter), (views.up_bias, 4), (views.down_bias, 4)):
            if part is not None:
                part.copy_(torch.randn(part.shape, generator=generator) * width**-0.5)
    return store


class Stage:
    """An engine, a store of ``formats``, mailboxes and the device that posts to them."""

    def __init__(
        self,
        formats: list[ExpertFormat],
        threads: int = 2,
        isa: Isa = Isa.AUTO,
        max_tokens: int = 4,
        top_k: int = 3,
        store: HostStore | None = None,
    ) -> None:
        self.store = filled(store or HostStore(formats, [EXPERTS] * len(formats)))
        self.engine = CpuExperts(threads, isa=isa)
        self.boxes = Mailboxes(self.engine, self.store, max_tokens, top_k, pin_memory=False)
        self.device = PostingDevice(self.boxes)

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.store.close()

    def batch(self, layer: int, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden rows, ids (some of them sentinels) and weights."""
        fmt, generator = self.store.formats[layer], torch.Generator().manual_seed(seed)
        choices = (rows, self.boxes.ids.shape[2])
        return (
            torch.randn(rows, fmt.hidden, generator=generator).to(fmt.dtype),
            torch.randint(-1, EXPERTS + 1, choices, generator=generator, dtype=torch.int32),
            torch.rand(choices, generator=generator) + 0.1,
        )

    def submitted(
        self,
        layer: int,
        batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        divided: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """The same batch as an ordinary job: the same result to the bit."""
        out = torch.full(batch[0].shape, math.nan, dtype=torch.float32)
        self.engine.run(self.store.formats[layer], self.store.addresses(layer), *batch, out, divided)
        return out

    def expected(
        self,
        layer: int,
        batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        divided: tuple[int, int] = (-1, 0),
    ) -> torch.Tensor:
        """In float64. What the device computes of a divided expert meets columns of zeros."""
        views, (expert, first) = self.store.views(layer), divided
        if expert >= 0:
            views = replace(views, down=views.down.clone())
            views.down[expert, :, :first] = 0
        return moe_float64(*batch, views, self.store.formats[layer])

    def post(self, layer: int, rows: int = 1, seed: int = 0) -> None:
        self.device.write(layer, *self.batch(layer, rows, seed))
        self.device.request(layer, rows)

    def slow_down(self, layer: int, seconds: float) -> None:
        """Throttles the engine so that a one-row job of ``layer`` takes ``seconds`` or more."""
        self.boxes.arm()
        times = []
        for _ in range(20):
            self.post(layer)
            self.device.wait(layer)
            times.append(int(self.boxes.busy_ns[layer, 0]))
        self.boxes.disarm()
        self.engine.throttle(seconds / (min(times) / 1e9))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("isa", supported_isas(), ids=lambda isa: isa.label)
def test_random_requests(isa: Isa, threads: int) -> None:
    """Any order of layers, one or two outstanding at once, any number of rows up to the most, some with a divided
    expert."""
    dice = random.Random(f"{isa}{threads}")
    for _ in range(6):
        formats = [
            ExpertFormat(
                dice.choice([1, 33, 64, 130]),
                dice.choice([1, 17, 32, 65, 130]),
                dice.choice([torch.bfloat16, torch.float16, torch.float32]),
                SILU,
                gated=dice.random() < 0.7,
                bias=dice.random() < 0.5,
            )
            for _ in range(dice.randint(2, 4))
        ]
        most = dice.choice([1, 4, 19])
        with Stage(formats, threads, isa, max_tokens=most, top_k=dice.randint(1, 5)) as stage:
            stage.boxes.arm()
            for _ in range(10):
                layers = dice.sample(range(len(formats)), dice.randint(1, 2))
                batches = {layer: stage.batch(layer, dice.randint(1, most), dice.getrandbits(30)) for layer in layers}
                divided = {}
                for layer, batch in batches.items():
                    parts = (formats[layer].inter - 1) // 32
                    if parts and dice.random() < 0.7:
                        divided[layer] = (dice.randrange(EXPERTS), 32 * dice.randint(1, parts))
                    else:
                        divided[layer] = (-1, 0)
                    stage.device.write(layer, *batch)
                    stage.device.divide(layer, *divided[layer])
                for layer, batch in batches.items():
                    stage.device.request(layer, len(batch[0]))
                dice.shuffle(layers)
                for layer in layers:
                    rows = len(batches[layer][0])
                    out = stage.device.result(layer)
                    assert out[rows:].isnan().all(), "rows that were not posted were written"
                    fmt = formats[layer]
                    want = stage.expected(layer, batches[layer], divided[layer])
                    tolerance = 2e-2 if fmt.dtype is torch.bfloat16 else 1e-4
                    torch.testing.assert_close(out[:rows].double(), want, rtol=tolerance, atol=tolerance)
                    assert torch.equal(out[:rows], stage.submitted(layer, batches[layer], divided[layer]))
            assert stage.boxes.pending() is None
            stage.boxes.raise_failure()


def test_memory_is_as_documented() -> None:
    with Stage([SMALL, WIDE], max_tokens=6, top_k=3) as stage:
        boxes = stage.boxes
        words = {boxes.request: torch.int32, boxes.done: torch.int32, boxes.busy_ns: torch.int64}
        for word, dtype in words.items():
            assert word.dtype is dtype
            assert word.stride(0) * word.itemsize == 64
            assert word.data_ptr() % 64 == 0
        for choices in (boxes.ids, boxes.cpu_ids, boxes.weights):
            assert choices.shape == (2, 6, 3)
        assert [tuple(hidden.shape) for hidden in boxes.hidden] == [(6, 33), (6, 512)]
        assert [tuple(out.shape) for out in boxes.out] == [(6, 33), (6, 512)]
        assert boxes.request.tolist() == [[0] * 4 + [-1] + [0] * 11] * 2
        for tensor in (boxes.done, boxes.busy_ns, boxes.ids, boxes.cpu_ids, boxes.weights, *boxes.hidden, *boxes.out):
            assert not tensor.any()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_two_thousand_quick_requests(threads: int) -> None:
    with Stage([SMALL] * 7, threads) as stage:
        device, layers = stage.device, 7
        batches = [stage.batch(layer, 2, layer) for layer in range(layers)]
        expected = [stage.submitted(layer, batch) for layer, batch in enumerate(batches)]
        for layer, batch in enumerate(batches):
            device.write(layer, *batch)
        stage.boxes.arm()
        for i in range(2000):
            layer = i * 3 % layers
            device.request(layer, 2)
            device.wait(layer)
            if i % 50 < layers:  # of every layer in turn
                assert torch.equal(stage.boxes.out[layer][:2], expected[layer])
                stage.boxes.out[layer].fill_(math.nan)


def test_a_request_is_cleared_before_its_job_starts() -> None:
    """Cleared after done it could be the next one."""
    with Stage([WIDE, SLOW]) as stage:
        stage.slow_down(1, 0.2)
        stage.boxes.arm()
        stage.post(1)
        stage.device.wait_until_begun(1)
        assert not stage.device.answered(1), "the request was cleared when the job was over"
        assert stage.boxes.pending() == 1
        assert stage.boxes.out[1].isnan().any()
        stage.device.wait(1)
        assert stage.boxes.pending() is None


def test_arming_wakes_workers_that_sleep() -> None:
    with Stage([SMALL]) as stage:
        for _ in range(20):
            time.sleep(0.002)  # beyond the moment for which workers spin
            stage.boxes.arm()
            stage.boxes.arm()
            stage.post(0)
            stage.device.wait(0)
            stage.boxes.disarm()
            stage.boxes.disarm()


@pytest.mark.parametrize("threads", [1, 2])
def test_cycles_with_ordinary_jobs_between(threads: int) -> None:
    dice = random.Random(threads)
    with Stage([SMALL, SMALL, WIDE], threads) as stage:
        batches = [stage.batch(layer, 3, layer) for layer in range(3)]
        expected = [stage.submitted(layer, batch) for layer, batch in enumerate(batches)]
        for layer, batch in enumerate(batches):
            stage.device.write(layer, *batch)
        for _ in range(300):
            layer, other = dice.sample(range(3), 2)
            early = dice.random() < 0.3  # posted before anybody looks
            if early:
                stage.device.request(layer, 3)
            stage.boxes.arm()
            if not early:
                stage.device.request(layer, 3)
            if dice.random() < 0.5:
                assert torch.equal(stage.submitted(other, batches[other]), expected[other])
            stage.device.wait(layer)
            assert torch.equal(stage.boxes.out[layer][:3], expected[layer])
            stage.boxes.disarm()
            if dice.random() < 0.5:
                assert torch.equal(stage.submitted(other, batches[other]), expected[other])


@pytest.mark.parametrize("threads", [1, 2])
def test_ordinary_jobs_that_never_pause_do_not_starve_requests(threads: int) -> None:
    with Stage([SMALL], threads) as stage:
        batch, stop = stage.batch(0, 4, 0), threading.Event()
        expected = stage.submitted(0, batch)
        stage.slow_down(0, 1e-3)  # the queue must not run empty while this process gets no processor
        failures: list[BaseException] = []

        def flood() -> None:
            args = (stage.store.formats[0], stage.store.addresses(0), *batch)
            outs = [torch.empty_like(expected) for _ in range(32)]
            try:
                tickets = [stage.engine.submit(*args, out) for out in outs]
                while not stop.is_set():
                    tickets.pop(0).wait()
                    outs.append(outs.pop(0))
                    assert torch.equal(outs[-1], expected)
                    tickets.append(stage.engine.submit(*args, outs[-1]))
                for ticket in tickets:
                    ticket.wait()
            except BaseException as error:  # reported by the test's own thread
                failures.append(error)

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            stage.boxes.arm()
            for _ in range(8):
                stage.device.write(0, *batch)
                stage.device.request(0, 4)
                end = time.monotonic() + 10
                while not stage.device.answered(0):
                    assert time.monotonic() < end, "the request waits for ever"
                    time.sleep(1e-4)  # for the flood
                assert torch.equal(stage.device.result(0), expected)
        finally:
            stop.set()
            thread.join(30)
        assert not failures, failures[0]


def test_jobs_run_in_the_order_in_which_they_came() -> None:
    with Stage([SMALL, SLOW]) as stage:
        batches = [stage.batch(0, 2, seed) for seed in range(5)]
        expected = [stage.submitted(0, batch) for batch in batches]
        stage.slow_down(1, 0.05)
        stage.boxes.arm()
        stage.post(1)
        stage.device.wait_until_begun(1)
        out = torch.empty_like(expected[0])
        args = (stage.store.formats[0], stage.store.addresses(0))
        tickets = [stage.engine.submit(*args, *batch, out) for batch in batches]
        for ticket in tickets:
            ticket.wait()
        assert stage.device.answered(1)
        assert torch.equal(out, expected[-1]), "the last job was not the last"


@pytest.mark.parametrize("threads", [2, 4])
def test_the_time_of_a_job_is_its_own(threads: int) -> None:
    """A request that comes while another one's job runs has to wait; it was not busy then."""
    with Stage([SMALL, SLOW], threads) as stage:
        lane = Mailboxes(stage.engine, stage.store, 4, 3, pin_memory=False)
        other = PostingDevice(lane)
        batch = stage.batch(1, 1, 0)
        stage.slow_down(1, 0.02)
        stage.boxes.arm()
        lane.arm()
        for _ in range(5):
            other.write(1, *batch)
            started = time.monotonic_ns()
            stage.post(1)
            other.request(1, 1)
            stage.device.wait(1)
            other.wait(1)
            both = int(stage.boxes.busy_ns[1, 0]) + int(lane.busy_ns[1, 0])
            assert both <= time.monotonic_ns() - started
        lane.close()


def test_two_lanes_are_armed_apart() -> None:
    with Stage([SMALL, WIDE]) as stage:
        lane = Mailboxes(stage.engine, stage.store, 4, 3, pin_memory=False)
        other = PostingDevice(lane)
        batch = stage.batch(1, 2, 5)
        expected = stage.submitted(1, batch)
        stage.boxes.arm()
        lane.arm()
        for _ in range(100):
            for device in (stage.device, other):
                device.write(1, *batch)
                device.request(1, 2)
            for device in (other, stage.device):
                assert torch.equal(device.result(1)[:2], expected)
        stage.boxes.disarm()
        other.request(1, 2)
        other.wait(1)
        stage.device.request(1, 2)
        time.sleep(0.02)
        assert not stage.device.answered(1), "a disarmed mailbox was served"
        assert (stage.boxes.pending(), lane.pending()) == (1, None)
        lane.arm()
        lane.close()
        other.request(1, 2)
        time.sleep(0.02)
        assert other.requested(1), "a closed mailbox was served"
        stage.boxes.arm()
        stage.device.wait(1)


class StoreWithoutExpert(HostStore):
    """Its layer 1 lacks expert 2."""

    def addresses(self, layer: int) -> np.ndarray:
        addresses = super().addresses(layer)
        if layer == 1:
            addresses[2] = 0
        return addresses


def test_a_failure_raises_done_and_reaches_the_caller() -> None:
    with Stage([], store=StoreWithoutExpert([SMALL] * 3, [EXPERTS] * 3)) as stage:
        boxes, device = stage.boxes, stage.device
        boxes.arm()
        hidden, ids, weights = stage.batch(1, 2, 0)
        for _ in range(3):
            device.write(1, hidden, torch.full_like(ids, 2), weights)
            device.request(1, 2)
            device.wait(1)
            with pytest.raises(EngineError, match="layer 1: expert 2 was chosen but has no block"):
                boxes.raise_failure()
            boxes.raise_failure()
            # Its neighbours and itself go on.
            for layer in (0, 1):
                batch = (hidden, torch.full_like(ids, 3), weights)
                device.write(layer, *batch)
                device.request(layer, 2)
                assert torch.equal(device.result(layer)[:2], stage.submitted(layer, batch))
        boxes.raise_failure()


@pytest.mark.parametrize("row", [0, 16, 33, -32, 256, 2**31 - 1])
def test_an_impossible_division_is_a_failure(row: int) -> None:
    with Stage([SMALL, WIDE]) as stage:
        boxes, device = stage.boxes, stage.device
        boxes.arm()
        batch = stage.batch(1, 2, 0)
        device.write(1, *batch)
        device.divide(1, 3, row)
        device.request(1, 2)
        assert device.result(1).isnan().all()
        with pytest.raises(EngineError, match=f"layer 1: expert 3 cannot be divided at row {row} of .* width 256"):
            boxes.raise_failure()
        device.divide(1, -1, row)
        device.request(1, 2)
        assert torch.equal(device.result(1)[:2], stage.submitted(1, batch))
        boxes.raise_failure()


def test_statistics_are_not_read() -> None:
    with Stage([WIDE]) as stage:
        stage.boxes.arm()
        batch = stage.batch(0, 2, 0)
        stage.device.write(0, *batch)
        stage.boxes.request[0, 1:4] = 10**9
        stage.boxes.request[0, 6:] = -(10**9)
        stage.device.request(0, 2)
        assert torch.equal(stage.device.result(0)[:2], stage.submitted(0, batch))
        stage.boxes.raise_failure()


@pytest.mark.parametrize("rows", [5, 2**31 - 1, -1])
def test_more_rows_than_there_is_room_for(rows: int) -> None:
    with Stage([SMALL, SMALL], max_tokens=4) as stage:
        stage.boxes.arm()
        stage.device.write(0, *stage.batch(0, 4, 0))
        stage.device.request(0, rows)
        assert stage.device.result(0).isnan().all()
        stage.post(1, 4)
        stage.device.wait(1)
        with pytest.raises(EngineError, match=f"layer 0: a device asked for {rows % 2**32} rows .* holds 4"):
            stage.boxes.raise_failure()


def test_the_first_of_several_failures_is_kept() -> None:
    with Stage([SMALL, SMALL]) as stage:
        stage.boxes.arm()
        for layer in (1, 0):
            stage.device.request(layer, 100 + layer)
            stage.device.wait(layer)
        with pytest.raises(EngineError, match="layer 1: a device asked for 101 rows"):
            stage.boxes.raise_failure()
        stage.boxes.raise_failure()


_OUT_OF_MEMORY = """
import resource
import torch
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.mailbox import Mailboxes
from greenroom.experts.store import HostStore
from tests.reference.posting_device import PostingDevice

store = HostStore([ExpertFormat(16, 65536, torch.bfloat16, Activation(ActivationKind.SILU))], [1])
with CpuExperts(2) as engine:
    boxes = Mailboxes(engine, store, 64, 1000, pin_memory=False)
    boxes.arm()
    device = PostingDevice(boxes)
    boxes.cpu_ids[0, 1:, 1:] = -1
    boxes.cpu_ids[0, 0, 1:] = -1
    device.request(0, 1)
    device.wait(0)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
    boxes.cpu_ids.zero_()  # 8 GiB of activation rows
    device.request(0, 64)
    device.wait(0)
    try:
        boxes.raise_failure()
    except Exception as error:
        print(type(error).__name__, error)
    boxes.cpu_ids[0, 0, 1:] = -1
    device.request(0, 1)
    device.wait(0)
    boxes.raise_failure()
    print("still runs")
"""


def test_no_memory_for_a_request_is_a_failure_and_no_end() -> None:
    """In a process whose memory is limited: how much another may take depends on the machine."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", _OUT_OF_MEMORY], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "EngineError layer 0: the CPU engine could not get memory" in done.stdout
    assert "still runs" in done.stdout


def test_disarm_waits_for_a_job_under_way() -> None:
    with Stage([SLOW, WIDE]) as stage:
        batch = stage.batch(0, 1, 0)
        expected = stage.submitted(0, batch)
        stage.slow_down(0, 0.1)
        stage.boxes.arm()
        stage.device.write(0, *batch)
        stage.device.request(0, 1)
        stage.device.wait_until_begun(0)
        assert not stage.device.answered(0)
        stage.boxes.disarm()
        assert stage.device.answered(0), "disarm did not wait for the job"
        assert torch.equal(stage.device.result(0)[:1], expected)
        # Nobody looks any more.
        stage.post(1)
        time.sleep(0.02)
        assert stage.device.requested(1)
        assert stage.boxes.pending() == 1
        stage.boxes.arm()
        stage.device.wait(1)


def test_parked_workers_use_no_processor_time() -> None:
    with Stage([SMALL]) as stage:
        stage.boxes.arm()
        stage.post(0)
        stage.device.wait(0)
        stage.boxes.disarm()
        time.sleep(0.05)  # workers spin for a moment after a job
        start = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - start < 0.02


def test_release_lets_a_device_go_on() -> None:
    with Stage([SMALL] * 3) as stage:
        boxes, device = stage.boxes, stage.device
        boxes.arm()
        with pytest.raises(EngineError, match="disarmed"):
            boxes.release()
        boxes.disarm()
        device.request(2, 1)
        assert boxes.pending() == 2
        boxes.release()
        assert boxes.pending() is None
        for layer in range(3):
            device.wait(layer)
        # The dropped request stays dropped.
        boxes.arm()
        time.sleep(0.01)
        assert not any(device.answered(layer) for layer in range(3))
        stage.post(2)
        device.wait(2)


def test_throttle_slows_work_down() -> None:
    def fastest() -> int:
        times = []
        for _ in range(20):
            stage.post(0)
            stage.device.wait(0)
            times.append(int(stage.boxes.busy_ns[0, 0]))
        return min(times)

    with Stage([WIDE]) as stage:
        stage.boxes.arm()
        full = fastest()
        stage.engine.throttle(20)
        assert fastest() > 6 * full
        stage.engine.throttle(1)
        assert fastest() < 3 * full
        for factor in (0.5, 0.0, -1.0, math.nan, math.inf):
            with pytest.raises(EngineError, match="1 or more times"):
                stage.engine.throttle(factor)
    with pytest.raises(EngineError, match="closed"):
        stage.engine.throttle(2)


def test_closing_in_either_order() -> None:
    for i in range(24):
        with Stage([WIDE, WIDE], threads=1 + i % 3) as stage:
            if i % 2:
                stage.boxes.arm()
            stage.post(i % 2)
            if i % 4 == 1:
                stage.device.wait_until_begun(1)
            if i % 3 == 0:
                stage.boxes.close()
            stage.engine.close()
            if i % 4 == 1:
                assert stage.device.answered(1), "closed in the middle of a job"
            stage.boxes.close()
            stage.boxes.close()
            with pytest.raises(EngineError, match="closed"):
                stage.boxes.arm()
            with pytest.raises(EngineError, match="closed"):
                Mailboxes(stage.engine, stage.store, 4, 3, pin_memory=False)
            stage.boxes.disarm()
            stage.boxes.raise_failure()
            stage.boxes.release()
            assert stage.boxes.pending() is None


def test_an_engine_keeps_mailboxes_that_nobody_holds() -> None:
    """The engine's workers read their memory."""
    with Stage([SMALL]) as stage:
        for _ in range(5):
            lane = Mailboxes(stage.engine, stage.store, 4, 3, pin_memory=False)
            device = PostingDevice(lane)
            lane.arm()
            request, done = lane.request, lane.done
            del lane, device
            request[0, 0] = 1
            end = time.monotonic() + 20
            while not done[0, 0]:
                assert time.monotonic() < end


def test_layers_are_checked_once_at_the_beginning() -> None:
    ungated = ExpertFormat(16, 8, torch.float32, Activation(ActivationKind.SWIGLU_OAI), gated=False)
    with HostStore([SMALL, ungated], [2, 2]) as store, CpuExperts(1) as engine:
        with pytest.raises(EngineError, match="needs experts with a gate"):
            Mailboxes(engine, store, 4, 3, pin_memory=False)
        with HostStore([SMALL], [2]) as good, pytest.raises(EngineError, match="at least one row"):
            Mailboxes(engine, good, 0, 3, pin_memory=False)
