"""Transfers on a GPU: what is copied, and what orders copies and compute."""

import numpy as np
import pytest
import torch

from greenroom.kernels.gpu.batch_copy import has_batch_copy
from greenroom.kv.config import KVOffloadConfig
from greenroom.kv.copies import Direction
from greenroom.kv.cuda_copies import WAYS
from greenroom.kv.host_memory import HostMemory
from greenroom.kv.layouts import BlockLayout, TensorLayout, block_layout
from greenroom.kv.make import make_copies
from greenroom.kv.offload import HostKVOffload
from greenroom.kv.prefix import block_keys
from greenroom.kv.transfer import StreamWorker, TransferResult

pytestmark = pytest.mark.cuda

BLOCKS, PARTS = 300, 400
LAYOUTS = [TensorLayout.KV_FIRST, TensorLayout.BLOCKS_FIRST, TensorLayout.BLOCKS_FIRST]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    if request.param != "kernel" and not has_batch_copy():
        pytest.skip("this driver has no batches of copies")
    return request.param


class Rig:
    """Tensors of three layouts, host memory and a worker."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        self.tensors = [
            torch.randn(2, BLOCKS, 16, 4, 128, device="cuda").to(torch.bfloat16),
            torch.randn(BLOCKS, 16, 2, 32, device="cuda"),
            torch.randn(BLOCKS, 16, 9, device="cuda").to(torch.bfloat16),
        ]
        self.layout = block_layout(self.tensors, LAYOUTS)
        self.memory = HostMemory(PARTS, self.layout.block_bytes, lock=True)
        self.worker = StreamWorker(
            make_copies(self.layout, self.tensors, self.memory.parts, way),
            self.layout.block_bytes,
            torch.device("cuda"),
        )

    def images(self) -> torch.Tensor:
        """uint8 [blocks, block_bytes] on the host: what the device holds now."""
        return images_of(self.layout, self.tensors)

    def finish(self) -> list[TransferResult]:
        results = []
        while self.worker._pending[Direction.LOAD] or self.worker._pending[Direction.STORE]:
            self.worker.wait(30)
            results += self.worker.poll()
        return results

    def close(self) -> None:
        self.worker.close()
        self.memory.close()


def images_of(layout: BlockLayout, tensors: list[torch.Tensor]) -> torch.Tensor:
    rows = []
    for tensor, kind in zip(tensors, LAYOUTS, strict=True):
        for half in tensor if kind is TensorLayout.KV_FIRST else [tensor]:
            rows.append(half.contiguous().view(half.shape[0], -1).view(torch.uint8).cpu())
    images = torch.cat(rows, dim=1)
    assert images.shape == (layout.num_blocks, layout.block_bytes)
    return images


@pytest.fixture
def rig(way: str):
    rig = Rig(way)
    yield rig
    rig.close()


def warm_up(rig: Rig) -> None:
    """Compiles, which would take longer than what a test makes a stream sleep."""
    rig.worker.submit(Direction.STORE, np.arange(10), np.arange(10))
    rig.finish()


def test_blocks_come_back_as_they_were(rig: Rig) -> None:
    rng = np.random.default_rng(0)
    before = rig.images()
    blocks, parts = rng.permutation(BLOCKS)[:250], rng.permutation(PARTS)[:250]
    rig.worker.submit(Direction.STORE, blocks, parts)
    (stored,) = rig.finish()
    assert stored.error is None
    assert stored.nbytes == 250 * rig.layout.block_bytes
    assert 1e9 < stored.nbytes / stored.seconds < 1e12
    assert torch.equal(rig.memory.parts[parts], before[blocks])
    others = np.setdiff1d(np.arange(PARTS), parts)
    assert not rig.memory.parts[others].any()
    targets = rng.permutation(BLOCKS)[:250]
    rig.worker.submit(Direction.LOAD, targets, parts)
    (loaded,) = rig.finish()
    assert loaded.error is None
    expected = before.clone()
    expected[targets] = before[blocks]
    assert torch.equal(rig.images(), expected)


def test_a_store_waits_for_compute_and_a_load_does_too(rig: Rig) -> None:
    """Compute that takes long is under way when a job begins."""
    before = rig.images()
    every, parts = np.arange(BLOCKS), np.arange(BLOCKS)
    torch.cuda._sleep(200_000_000)
    for tensor in rig.tensors:
        tensor.neg_()
    rig.worker.submit(Direction.STORE, every, parts)
    assert rig.worker.poll() == []
    rig.finish()
    negated = rig.images()
    assert not torch.equal(negated, before)
    assert torch.equal(rig.memory.parts[:BLOCKS], negated)
    rig.memory.parts[:BLOCKS] = before
    # What reads the blocks before a load begins sees what was there.
    torch.cuda._sleep(200_000_000)
    copies = [tensor.clone() for tensor in rig.tensors]
    rig.worker.submit(Direction.LOAD, every, parts)
    rig.finish()
    assert torch.equal(images_of(rig.layout, copies), negated)
    assert torch.equal(rig.images(), before)


def test_a_store_does_not_hold_up_compute(rig: Rig) -> None:
    """Nothing on the compute stream waits for a worker's streams."""
    warm_up(rig)
    blocker = torch.cuda.Event()
    stream = rig.worker._streams[Direction.STORE]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)
    rig.worker.submit(Direction.STORE, np.arange(10), np.arange(10))
    blocker.record()
    blocker.synchronize()
    assert rig.worker.poll() == []
    rig.finish()


def test_many_jobs_end_in_order(rig: Rig) -> None:
    rng = np.random.default_rng(1)
    before = rig.images()
    numbers = {Direction.LOAD: [], Direction.STORE: []}
    rig.worker.submit(Direction.STORE, np.arange(BLOCKS), np.arange(BLOCKS))
    rig.finish()
    for _ in range(50):
        some = rng.permutation(BLOCKS // 2)[: rng.integers(1, 40)]
        numbers[Direction.LOAD].append(rig.worker.submit(Direction.LOAD, some, some))
        other = BLOCKS // 2 + rng.permutation(BLOCKS // 2)[: rng.integers(1, 40)]
        numbers[Direction.STORE].append(rig.worker.submit(Direction.STORE, other, other))
    results = rig.finish()
    for direction, submitted in numbers.items():
        assert [result.job for result in results if result.direction is direction] == submitted
    assert all(result.error is None for result in results)
    assert torch.equal(rig.images(), before)
    assert torch.equal(rig.memory.parts[:BLOCKS], before)


def test_a_job_that_cannot_begin_ends_behind_what_it_began(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up(rig)
    copies = rig.worker._copies
    start = copies.start

    def fails_half_way(direction: Direction, blocks: np.ndarray, parts: np.ndarray) -> None:
        torch.cuda._sleep(100_000_000)
        start(direction, blocks[:1], parts[:1])
        raise RuntimeError("no")

    monkeypatch.setattr(copies, "start", fails_half_way)
    rig.worker.submit(Direction.STORE, np.arange(2), np.arange(2))
    assert rig.worker.poll() == []
    (result,) = rig.finish()
    assert isinstance(result.error, RuntimeError)
    monkeypatch.undo()
    rig.worker.submit(Direction.STORE, np.arange(2), np.arange(2))
    (result,) = rig.finish()
    assert result.error is None
    assert torch.equal(rig.memory.parts[:2], rig.images()[:2])


def test_offload_from_end_to_end(way: str) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(64, 16, 4, 128, device="cuda").to(torch.bfloat16) for _ in range(4)]
    before = [tensor.clone() for tensor in tensors]
    keys = block_keys(range(40 * 16), 16)
    offload = HostKVOffload(KVOffloadConfig("16MiB", 4, "arc"), tensors, way=way)
    try:
        offload.start_store(keys, list(range(40)))
        while not offload.poll().done:
            offload.wait(10)
        for tensor in tensors:
            tensor.zero_()
        assert offload.lookup(keys[3:]) == 37
        offload.start_load(keys[3:], list(range(63, 63 - 37, -1)))
        while not offload.poll().done:
            offload.wait(10)
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(tensor[list(range(63, 63 - 37, -1))], old[3:40])
            assert not tensor[: 63 - 36].any()
    finally:
        offload.close()
