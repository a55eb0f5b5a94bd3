"""Two halves of a step at once: their layers interleave in any order, and each gets what it would get alone.

On a GPU two streams run them. Without one, a scheduler plays the device: it takes turns at random between the halves,
at the points where a stream may stand still, while a real CPU engine serves the mailboxes of both.
"""

import random
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from greenroom.errors import EngineError
from greenroom.experts.decode_path import DecodePath
from greenroom.experts.decode_steps import DecodeSteps
from greenroom.experts.mailbox import Mailboxes
from greenroom.experts.manager import OffloadManager

pytest.importorskip("triton")

from greenroom.experts import expert_launches
from greenroom.experts.finished_step import busy_s
from greenroom.kernels.gpu.tiling import Tiling
from tests.experts.test_decode_path import DEVICE, FORMATS, check, decode, only, random_batch

FMT, EXPERTS, TOP_K = FORMATS["bf16"], 10, 3
ON_GPU = DEVICE.type == "cuda"
Batch = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def few_large_tiles(monkeypatch):
    """The interpreter runs program after program; what each computes does not depend on their number."""
    if not ON_GPU:
        monkeypatch.setattr(expert_launches, "choose_tilings", lambda tokens, itemsize: (Tiling(64, 16, 64, 4, 3),) * 2)


class Halves:
    """Steps with a second path beside the first."""

    def __init__(self, manager: OffloadManager, steps: DecodeSteps, rows: int) -> None:
        self.manager, self.steps = manager, steps
        boxes = Mailboxes(steps.path.mailboxes._engine, manager.store, rows, TOP_K, pin_memory=ON_GPU)
        self.second = DecodePath(manager.store, manager.tier.slots, boxes, rows, TOP_K)
        steps.use_second(self.second)

    def step(self, counts: tuple[int, int], batches: tuple[list[Batch], list[Batch]], rng: random.Random) -> list:
        """One step; of either half the outputs of all layers, on the host."""
        self.steps.begin(*counts)
        outputs = self._on_streams(batches) if ON_GPU else self._in_turns(batches, rng)
        self.steps.enqueued()
        if ON_GPU:
            torch.cuda.synchronize()
        self.steps.finish()
        return [[out.cpu() for out in half] for half in outputs]

    def _on_streams(self, batches: tuple[list[Batch], list[Batch]]) -> list:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        moved = [[tuple(tensor.to(DEVICE) for tensor in batch) for batch in half] for half in batches]
        side.wait_stream(main)
        outputs = [[self.steps.path.run(layer, *batch) for layer, batch in enumerate(moved[0])]]
        with torch.cuda.stream(side):
            outputs.append([self.second.run(layer, *batch) for layer, batch in enumerate(moved[1])])
        main.wait_stream(side)
        torch.cuda.synchronize()
        return outputs

    def _in_turns(self, batches: tuple[list[Batch], list[Batch]], rng: random.Random) -> list:
        outputs: list[list[torch.Tensor]] = [[], []]
        paths = (self.steps.path, self.second)
        left = [_stream(path, half, out) for path, half, out in zip(paths, batches, outputs, strict=True)]
        deadline = time.monotonic() + 30
        while left:
            stream = rng.choice(left)
            if next(stream, "ended") == "ended":
                left.remove(stream)
            assert time.monotonic() < deadline, "the halves wait for each other"
        return outputs


def _stream(path: DecodePath, batches: list[Batch], outputs: list[torch.Tensor]) -> Iterator[None]:
    """``DecodePath.run`` of all layers, standing still where a stream may."""
    for layer, (hidden, ids, weights) in enumerate(batches):
        path._dispatch(layer, FMT, hidden, ids, weights)
        yield
        path._run_experts(layer, FMT, hidden, weights, len(ids))
        yield
        while path.mailboxes.done[layer, 0] != 1:
            yield
        outputs.append(path._combine(layer, hidden, len(ids)))
        yield


@pytest.mark.parametrize("seed", range(20 if ON_GPU else 5))
def test_any_order_of_two_halves_gives_what_each_gives_alone(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layers, rows = 2, 4
    with decode(FMT, EXPERTS, rng.choice([0, 3, 10]), rows, TOP_K, layers=layers) as (manager, steps):
        halves = Halves(manager, steps, rows)
        for _ in range(2):
            steps.split = only(rng.choice([0, 5, 10]), EXPERTS)
            steps.path.mailboxes._engine.throttle(rng.choice([1.0, 1.0, 50.0]))
            # Halves of all sizes: none with tokens, or none with work for the CPU, too.
            counts = rng.randint(0, rows), rng.randint(0, rows)
            batches = tuple([random_batch(FMT, EXPERTS, rows, TOP_K) for _ in range(layers)] for _ in counts)
            for half, count, outputs in zip(batches, counts, halves.step(counts, batches, rng), strict=True):
                for layer, (batch, out) in enumerate(zip(half, outputs, strict=True)):
                    if count:
                        check(out, batch, manager, count, layer)
                    else:
                        assert not out.any()
            manager.check_invariants()
        steps.path.mailboxes._engine.throttle(1.0)
        steps.flush()
        halves.second.mailboxes.close()


def test_a_step_learns_from_both_halves_and_from_no_padding():
    with decode(FMT, EXPERTS, 0, 4, TOP_K) as (manager, steps):
        halves, learnt = Halves(manager, steps, 4), []
        manager.learn = learnt.append
        first, second = random_batch(FMT, EXPERTS, 4, TOP_K), random_batch(FMT, EXPERTS, 4, TOP_K)
        halves.step((3, 2), ([first], [second]), random.Random(0))
        steps.flush()
        (record,) = learnt
        assert record.ids.tolist() == [first[1][:3].tolist() + second[1][:2].tolist()]
        weights = torch.cat([first[2][:3], second[2][:2]]).numpy()
        np.testing.assert_array_equal(record.weights[0], weights)
        used = [len(first[1][:3].unique()), len(second[1][:2].unique())]
        assert record.lanes.sum() == sum(used)
        # A step in one piece behind it does not see the second half's mailboxes any more.
        steps.begin(1)
        steps.path.run(0, *(tensor.to(DEVICE) for tensor in first))
        steps.enqueued()
        if ON_GPU:
            torch.cuda.synchronize()
        steps.finish()
        steps.flush()
        assert learnt[1].ids.tolist() == [first[1][:1].tolist()]
        halves.second.mailboxes.close()


def test_both_halves_may_fail_and_the_next_step_is_not_blamed():
    with decode(FMT, EXPERTS, 0, 2, TOP_K) as (manager, steps):
        halves = Halves(manager, steps, 2)
        steps.split = only(0, EXPERTS)
        batches = tuple([random_batch(FMT, EXPERTS, 2, TOP_K)] for _ in range(2))
        tables = [path.mailboxes._addresses[0] for path in (steps.path, halves.second)]
        kept = [table.copy() for table in tables]
        for table in tables:
            table[:] = 0
        with pytest.raises(EngineError, match=r"^decode step 0, first half, layer 0: expert"):
            halves.step((2, 2), batches, random.Random(0))
        tables[0][:] = kept[0]
        with pytest.raises(EngineError, match=r"^decode step 1, second half, layer 0: expert"):
            halves.step((2, 2), batches, random.Random(0))
        tables[1][:] = kept[1]
        halves.step((2, 2), batches, random.Random(0))
        halves.second.mailboxes.close()


def test_a_second_half_that_cannot_begin_leaves_nothing_open():
    with decode(FMT, EXPERTS, 0, 2, TOP_K) as (manager, steps):
        halves = Halves(manager, steps, 2)
        halves.second.mailboxes.close()
        for _ in range(2):
            with pytest.raises(EngineError, match="the mailboxes are closed"):
                steps.begin(1, 1)
        # Neither the step nor the first half's mailboxes are open any more.
        boxes = steps.path.mailboxes
        boxes.request[0, 0] = 1
        time.sleep(0.02)
        assert boxes.request[0, 0] == 1, "they are still armed"
        boxes.request[0, 0] = 0
        batch = random_batch(FMT, EXPERTS, 2, TOP_K)
        steps.begin(2)
        out = steps.path.run(0, *(tensor.to(DEVICE) for tensor in batch))
        steps.enqueued()
        if ON_GPU:
            torch.cuda.synchronize()
        steps.finish()
        check(out.cpu(), batch, manager, 2)


# --- what the split learns


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=30))
def test_the_time_of_a_shared_lane_is_counted_once(intervals):
    begin = np.array([start for start, _ in intervals], dtype=np.int64)
    end = begin + np.array([length for _, length in intervals], dtype=np.int64)
    covered = {moment for start, stop in zip(begin, end, strict=True) for moment in range(start, stop)}
    assert busy_s(begin, end) * 1e9 == pytest.approx(len(covered))


def test_halves_that_share_the_link_do_not_make_it_slow():
    """Each half reads four experts while the other does: eight in the time that eight take alone."""
    from greenroom.experts.decode_steps import FinishedStep
    from greenroom.experts.idle_gap import IdleGap

    lanes = np.zeros((2, 1, 5), dtype=np.int32)
    lanes[:, :, 1] = 4
    spans = np.zeros((2, 1, 8), dtype=np.int64)
    spans[0, 0, :2], spans[1, 0, :2] = (1_000, 801_000), (11_000, 811_000)
    nothing = np.zeros((1, 2, 3))
    fields = {"ids": nothing, "weights": nothing, "lanes": lanes, "busy_ns": np.zeros((2, 1)), "spans": spans}
    extra = {name: None for name in FinishedStep.__dataclass_fields__ if name not in fields}
    times = FinishedStep(**fields, **extra).times(np.array([64]), timed=True, gap=IdleGap())
    assert times.streamed == 8
    assert times.streamed_s == pytest.approx(810e-6)
