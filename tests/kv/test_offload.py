"""HostKVOffload on a CPU device, against the bytes that were stored."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from greenroom.errors import ConfigError
from greenroom.kv.base import Transfers
from greenroom.kv.config import KVOffloadConfig
from greenroom.kv.copies import BlockCopies
from greenroom.kv.offload import HostKVOffload
from greenroom.kv.prefix import START, block_keys, tail_key

BLOCKS, SIZE = 12, 4


def device_tensors(seed: int = 0) -> list[torch.Tensor]:
    """Two layers of different widths and types."""
    torch.manual_seed(seed)
    return [
        torch.randn(BLOCKS, SIZE, 2, 8),
        torch.randn(BLOCKS, SIZE, 2, 6),
        torch.randn(BLOCKS, SIZE, 10).to(torch.bfloat16),
    ]


def host_size(tensors: list[torch.Tensor], blocks: int) -> int:
    return blocks * sum(tensor[0].numel() * tensor.element_size() for tensor in tensors)


def settle(offload: HostKVOffload) -> Transfers:
    """Everything that ends until nothing is under way."""
    done: list[int] = []
    failed: list[int] = []
    while offload._tickets:
        offload.wait(10)
        ended = offload.poll()
        done += ended.done
        failed += ended.failed
        offload.check()
    return Transfers(tuple(done), tuple(failed))


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("factor", [1, 3])
def test_blocks_come_back_as_they_were(policy: str, factor: int) -> None:
    tensors = device_tensors()
    before = [tensor.clone() for tensor in tensors]
    keys = block_keys(range(7 * SIZE), SIZE)
    offload = HostKVOffload(KVOffloadConfig(host_size(tensors, 9), factor, policy), tensors)
    try:
        stored = [3, 0, 7, 11, 5, 1, 2]
        job = offload.start_store(keys, stored)
        assert job is not None
        assert offload.lookup(keys) == 0  # not before it is there
        assert settle(offload) == Transfers((job,))
        whole = len(keys) // factor * factor
        assert offload.lookup(keys) == whole
        for tensor in tensors:
            tensor.fill_(-1)
        # The device has the first block; the rest begins inside a host block.
        targets = [9, 8, 7, 6, 5, 4][: whole - 1]
        assert offload.lookup(keys[1:]) == whole - 1
        load = offload.start_load(keys[1:whole], targets)
        assert settle(offload) == Transfers((load,))
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(tensor[targets], old[stored[1:whole]])
            untouched = sorted(set(range(BLOCKS)) - set(targets))
            assert torch.equal(tensor[untouched], torch.full_like(tensor[untouched], -1))
        stats = offload.stats()
        assert (stats.store.blocks, stats.load.blocks) == (whole, whole - 1)
        assert stats.load.nbytes == host_size(tensors, whole - 1)
        assert (stats.queried_blocks, stats.hit_blocks) == (2 * len(keys) + len(keys) - 1, 2 * whole - 1)
        assert offload.start_store(keys, stored) is None  # all of it is there
    finally:
        offload.close()


def test_failed_jobs_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = device_tensors()
    keys = block_keys(range(3 * SIZE), SIZE)
    offload = HostKVOffload(KVOffloadConfig(host_size(tensors, 3)), tensors)
    try:
        broken = Broken(offload._worker._copies)
        monkeypatch.setattr(offload._worker, "_copies", broken)
        job = offload.start_store(keys, [0, 1, 2])
        assert settle(offload) == Transfers(failed=(job,))
        assert offload.lookup(keys) == 0
        assert offload.stats().host_blocks_used == 0
        broken.works = True
        settle_store(offload, keys)
        broken.works = False
        load = offload.start_load(keys, [3, 4, 5])
        assert settle(offload) == Transfers(failed=(load,))
        assert offload.lookup(keys) == 3  # the copy on the host is as good as before
        stats = offload.stats()
        assert (stats.store.jobs, stats.store.failed, stats.store.blocks) == (2, 1, 3)
        assert (stats.load.jobs, stats.load.failed, stats.load.nbytes) == (1, 1, 0)
    finally:
        offload.close()


def test_nothing_that_is_under_way_is_evicted() -> None:
    tensors = device_tensors()
    first, second = block_keys(range(2 * SIZE), SIZE), block_keys(range(100, 100 + 2 * SIZE), SIZE)
    offload = HostKVOffload(KVOffloadConfig(host_size(tensors, 2)), tensors)
    try:
        job = offload.start_store(first, [0, 1])
        assert offload.start_store(second, [2, 3]) is None  # no place, and nothing may leave
        assert offload.stats().refused_stores == 1
        assert settle(offload).done == (job,)
        load = offload.start_load(first, [4, 5])
        assert offload.start_store(second, [2, 3]) is None
        assert settle(offload).done == (load,)
        settle_store(offload, second)
        assert (offload.lookup(second), offload.lookup(first)) == (2, 0)
        assert offload.stats().evictions == 2
    finally:
        offload.close()


def test_where_room_lacks_the_beginning_is_stored() -> None:
    tensors = device_tensors()
    before = [tensor.clone() for tensor in tensors]
    keys = block_keys(range(4 * SIZE), SIZE)
    offload = HostKVOffload(KVOffloadConfig(host_size(tensors, 3)), tensors)
    try:
        settle_store(offload, keys)
        assert offload.start_store(keys[3:], [3], keys[2]) is None  # not for the blocks before it
        offload.start_load(keys[:3], [9, 10, 11])
        settle(offload)
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(tensor[9:12], old[:3])
    finally:
        offload.close()


def test_a_tail_comes_back_and_part_of_a_full_block() -> None:
    tensors = device_tensors()
    before = [tensor.clone() for tensor in tensors]
    (first,) = block_keys(range(SIZE), SIZE)
    tail = tail_key(first, [4, 5])
    offload = HostKVOffload(KVOffloadConfig(host_size(tensors, 3)), tensors)
    try:
        offload.start_store([first, tail], [3, 7], START, [range(SIZE), [4, 5]])
        assert offload.lookup_part(START, [0, 1]) is None  # not before it is there
        settle(offload)
        assert offload.lookup_part(START, [0, 1, 9]) == (first, 2)
        assert offload.lookup([first]) == 1
        assert offload.lookup_part(first, [4, 5, 6]) == (tail, 2)
        load = offload.start_load([first, tail], [0, 1])
        assert settle(offload).done == (load,)
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(tensor[:2], old[[3, 7]])
    finally:
        offload.close()


def test_only_what_is_missing_is_stored() -> None:
    tensors = device_tensors()
    before = [tensor.clone() for tensor in tensors]
    keys = block_keys(range(4 * SIZE), SIZE)
    offload = HostKVOffload(KVOffloadConfig(host_size(tensors, 8)), tensors)
    try:
        offload.start_store(keys[:2], [3, 5])
        settle(offload)
        offload.start_store(keys, [11, 10, 9, 8])  # the same beginning, elsewhere
        settle(offload)
        assert offload.stats().store.blocks == 4
        offload.start_load(keys, [0, 1, 2, 4])
        settle(offload)
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(tensor[[0, 1, 2, 4]], old[[3, 5, 9, 8]])
    finally:
        offload.close()


def test_only_what_was_looked_up_can_be_loaded() -> None:
    tensors = device_tensors()
    offload = HostKVOffload(KVOffloadConfig(host_size(tensors, 3)), tensors)
    try:
        with pytest.raises(ValueError, match="only 0 are in host memory"):
            offload.start_load(block_keys(range(SIZE), SIZE), [0])
        with pytest.raises(ValueError, match="need as many blocks"):
            offload.start_store(block_keys(range(SIZE), SIZE), [0, 1])
    finally:
        offload.close()
        offload.close()
    assert offload.poll() == Transfers()
    offload.wait(10)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"size": 10}, "does not hold one block"),
        ({"size": "1MB", "block_factor": 0}, "at least 1"),
        ({"size": "1MB", "policy": "fifo"}, "one of lru, arc"),
        ({"size": 0}, "some host memory"),
        ({"size": "much"}, "is not a size"),
    ],
)
def test_bad_configurations_are_refused(change: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        HostKVOffload(KVOffloadConfig(**change), device_tensors())


def test_a_machine_without_a_gpu_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import greenroom.kv.offload, greenroom.bench.kv"
    subprocess.run([sys.executable, "-c", code], check=True)


def settle_store(offload: HostKVOffload, keys: list[bytes]) -> None:
    job = offload.start_store(keys, list(range(len(keys))))
    assert settle(offload).done == (job,)


class Broken:
    """Copies half of the first block and fails, unless ``works``."""

    def __init__(self, copies: BlockCopies) -> None:
        self.copies = copies
        self.works = False

    def start(self, direction: object, blocks: np.ndarray, parts: np.ndarray) -> object:
        if self.works:
            return self.copies.start(direction, blocks, parts)
        self.copies.start(direction, blocks[:1], parts[:1])
        raise RuntimeError("broken")


def test_options() -> None:
    assert KVOffloadConfig.from_options(None, None, None) is None
    assert KVOffloadConfig.from_options("1MiB", None, None) == KVOffloadConfig("1MiB")
    assert KVOffloadConfig.from_options("1MiB", 4, "arc") == KVOffloadConfig("1MiB", 4, "arc")
    with pytest.raises(ConfigError, match="--kv-offload-policy needs KV offload"):
        KVOffloadConfig.from_options(None, None, "arc")
    with pytest.raises(ConfigError, match="--kv-offload-block-factor needs KV offload"):
        KVOffloadConfig.from_options(None, 2, None)
