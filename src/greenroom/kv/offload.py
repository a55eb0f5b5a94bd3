"""HostKVOffload: a second home for KV blocks in host memory."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from greenroom.errors import ConfigError
from greenroom.kv.base import KVOffloadStats, LaneStats, Transfers
from greenroom.kv.config import KVOffloadConfig
from greenroom.kv.copies import Direction
from greenroom.kv.host_memory import HostMemory
from greenroom.kv.layouts import BlockLayout, TensorLayout, block_layout
from greenroom.kv.make import make_copies
from greenroom.kv.manager import HostBlockManager, LoadTicket, StoreTicket
from greenroom.kv.prefix import START, BlockKey
from greenroom.kv.transfer import TransferWorker, make_worker


class HostKVOffload:
    """A ``KVOffload`` made of a ``HostBlockManager``, which keeps the books, and a ``TransferWorker``, which copies.

    Blocks that are being stored cannot be loaded yet; blocks that are being loaded cannot leave.

    Attributes:
        block_factor: device blocks in a host block. ``start_store`` keeps whole host blocks only: its keys must begin
            at a multiple of ``block_factor`` of the sequence's blocks.
    """

    def __init__(
        self,
        config: KVOffloadConfig,
        tensors: Sequence[torch.Tensor],
        layouts: Sequence[TensorLayout] | None = None,
        way: str | None = None,
    ) -> None:
        """Allocates, and page-locks beside a GPU, all of the host memory.

        Args:
            tensors: what the device keeps of KV blocks, all on one device.
            layouts: one for each; None if the first dimension of all counts the blocks.
            way: of copying on a GPU, see ``cuda_copies.WAYS``; None for the default.

        Raises:
            ConfigError: the size does not hold one host block, or a layout does not fit its tensor.
            MemoryLimitError: host memory does not suffice or cannot be page-locked.
        """
        if not tensors:
            raise ConfigError("this model keeps no KV blocks that could be offloaded")
        layout = block_layout(tensors, layouts or [TensorLayout.BLOCKS_FIRST] * len(tensors))
        self.block_factor = config.block_factor
        self._num_blocks = _host_blocks(config, layout)
        device = tensors[0].device
        self._memory = HostMemory(self._num_blocks * config.block_factor, layout.block_bytes, device.type == "cuda")
        try:
            self._manager = HostBlockManager(self._num_blocks, config.block_factor, config.policy)
            copies = make_copies(layout, tensors, self._memory.parts, way)
            self._worker: TransferWorker | None = make_worker(copies, layout.block_bytes, device)
        except BaseException:
            self._memory.close()
            raise
        self._block_bytes = layout.block_bytes
        self._tickets: dict[int, LoadTicket | StoreTicket] = {}
        self._lanes = {direction: LaneStats() for direction in Direction}
        self._queried = self._hit = self._refused = 0

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """See ``KVOffload``. Ends with a whole host block."""
        found = self._manager.lookup(keys)
        self._manager.touch(keys[:found])
        self._queried += len(keys)
        self._hit += found
        return found

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See ``KVOffload``."""
        self._manager.touch_last(keys)

    def lookup_part(self, after: BlockKey, tokens: Sequence[int]) -> tuple[BlockKey, int] | None:
        """See ``KVOffload``."""
        return self._manager.lookup_part(after, tokens)

    def start_load(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> int:
        """See ``KVOffload``.

        Raises:
            ValueError: ``lookup`` does not find all keys.
        """
        blocks = _numbers(block_ids, len(keys))
        ticket = self._manager.prepare_load(keys)
        return self._start(Direction.LOAD, blocks, ticket.parts, ticket)

    def start_store(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[int],
        after: BlockKey = START,
        tokens: Sequence[Sequence[int]] | None = None,
    ) -> int | None:
        """See ``KVOffload``. Blocks without ``tokens`` are not found by ``lookup_part``."""
        blocks = _numbers(block_ids, len(keys))
        ticket = self._manager.prepare_store(keys, after, tokens)
        if ticket is None:
            self._refused += 1
        if ticket is None or not ticket.keys:
            return None
        return self._start(Direction.STORE, blocks[ticket.sources], ticket.parts, ticket)

    def poll(self) -> Transfers:
        """See ``KVOffload``."""
        if self._worker is None:
            return Transfers()
        done: list[int] = []
        failed: list[int] = []
        for result in self._worker.poll():
            ok = result.error is None
            (done if ok else failed).append(result.job)
            ticket = self._tickets.pop(result.job)
            if isinstance(ticket, StoreTicket):
                self._manager.complete_store(ticket, ok)
            else:
                self._manager.complete_load(ticket)
            lane = self._lanes[result.direction]
            self._lanes[result.direction] = replace(
                lane,
                jobs=lane.jobs + 1,
                failed=lane.failed + (not ok),
                blocks=lane.blocks + ok * result.nbytes // self._block_bytes,
                nbytes=lane.nbytes + ok * result.nbytes,
                seconds=lane.seconds + result.seconds,
            )
        return Transfers(tuple(done), tuple(failed))

    def wait(self, timeout_s: float) -> None:
        """See ``KVOffload``. Returns at once if no job is under way."""
        if self._worker is not None:
            self._worker.wait(timeout_s)

    def stats(self) -> KVOffloadStats:
        """Counts so far."""
        return KVOffloadStats(
            load=self._lanes[Direction.LOAD],
            store=self._lanes[Direction.STORE],
            queried_blocks=self._queried,
            hit_blocks=self._hit,
            refused_stores=self._refused,
            evictions=self._manager.evictions,
            host_blocks=self._num_blocks,
            host_blocks_used=len(self._manager),
            host_bytes=self._num_blocks * self.block_factor * self._block_bytes,
        )

    def check(self) -> None:
        """
        Raises:
            AssertionError: the books contradict one another, or the jobs under way.
        """
        self._manager.check()

    def close(self) -> None:
        """See ``KVOffload``."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
            self._memory.close()

    def _start(
        self, direction: Direction, blocks: np.ndarray, parts: np.ndarray, ticket: LoadTicket | StoreTicket
    ) -> int:
        assert self._worker is not None, "closed"
        job = self._worker.submit(direction, blocks, parts)
        self._tickets[job] = ticket
        return job


def _host_blocks(config: KVOffloadConfig, layout: BlockLayout) -> int:
    size = layout.block_bytes * config.block_factor
    if config.num_bytes < size:
        raise ConfigError(
            f"KV offload of {config.num_bytes} bytes does not hold one block of {size} bytes; give it more"
            + (", or a smaller block factor" if config.block_factor > 1 else "")
        )
    return config.num_bytes // size


def _numbers(block_ids: Sequence[int], count: int) -> np.ndarray:
    if len(block_ids) != count:
        raise ValueError(f"{count} keys need as many blocks, not {len(block_ids)}")
    return np.asarray(block_ids, dtype=np.int64)
