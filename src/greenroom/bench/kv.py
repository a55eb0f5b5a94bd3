"""Speed of KV blocks between device and host memory, by the size of their pieces."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from greenroom.bench.result import BenchResult, gpu_name
from greenroom.engine.request import choose_device
from greenroom.errors import EngineError
from greenroom.kv.copies import Direction
from greenroom.kv.host_memory import HostMemory
from greenroom.kv.layouts import TensorLayout, block_layout
from greenroom.kv.make import make_copies
from greenroom.kv.transfer import TransferResult, TransferWorker, make_worker

RUN_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
"""Of a block in one tensor. 16 KiB is Qwen3-30B-A3B's with 16 tokens a block."""

_TENSORS = 24
_JOB_BYTES = 192 << 20
_CPU_JOB_BYTES = 16 << 20
_REPEATS = 5
_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class KvTransferBenchmark(BenchResult):
    """Jobs of ``blocks`` blocks that lie anywhere on the device, with images anywhere in host memory.

    way: how they are copied; "index" on a CPU device. run_bytes: of a block in each of ``tensors`` tensors.
    value: GB/s to the device, store_gb_s: from it, each alone; *_together: both at once. All medians, from the
    jobs' own start to their own end.
    submit_us: that the caller waits for the beginning of a load.
    """

    way: str
    default: bool
    run_bytes: int
    block_bytes: int
    tensors: int
    blocks: int
    store_gb_s: float
    load_gb_s_together: float
    store_gb_s_together: float
    submit_us: float


def bench_kv(device: str = "auto") -> Iterator[KvTransferBenchmark]:
    """Every way of copying that the machine has, with every size.

    Raises:
        ConfigError: an unknown device.
        MemoryLimitError: host memory does not suffice or cannot be page-locked.
    """
    place = choose_device(device)
    ways, default = ["index"], "index"
    if place.type == "cuda":
        from greenroom.kv import cuda_copies  # needs triton

        ways, default = cuda_copies.available_ways(), cuda_copies.default_way()
    for run_bytes in RUN_BYTES:
        with _Rig(place, run_bytes) as rig:
            for way in ways:
                yield rig.measure(way, way == default)


class _Rig:
    """Tensors of one size and as much host memory, for the time of some measurements."""

    def __init__(self, device: torch.device, run_bytes: int) -> None:
        self._device = device
        job_bytes = _JOB_BYTES if device.type == "cuda" else _CPU_JOB_BYTES
        self._blocks = max(1, job_bytes // (_TENSORS * run_bytes))
        shape = (2 * self._blocks, run_bytes // 2)
        self._tensors = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(_TENSORS)]
        self._layout = block_layout(self._tensors, [TensorLayout.BLOCKS_FIRST] * _TENSORS)
        self._memory = HostMemory(2 * self._blocks, self._layout.block_bytes, device.type == "cuda")
        self._random = np.random.default_rng(0)

    def __enter__(self) -> "_Rig":
        return self

    def __exit__(self, *error: object) -> None:
        self._memory.close()

    def measure(self, way: str, default: bool) -> KvTransferBenchmark:
        copies = make_copies(self._layout, self._tensors, self._memory.parts, None if way == "index" else way)
        worker = make_worker(copies, self._layout.block_bytes, self._device)
        try:
            self._once(worker, *Direction)  # compiles
            submit: list[float] = []
            load = [self._once(worker, Direction.LOAD, submit=submit)[Direction.LOAD] for _ in range(_REPEATS)]
            store = [self._once(worker, Direction.STORE)[Direction.STORE] for _ in range(_REPEATS)]
            both = [self._once(worker, *Direction) for _ in range(_REPEATS)]
        finally:
            worker.close()
        return KvTransferBenchmark(
            bench="kv",
            way=way,
            default=default,
            run_bytes=self._layout.runs[0].size,
            block_bytes=self._layout.block_bytes,
            tensors=_TENSORS,
            blocks=self._blocks,
            value=statistics.median(load),
            unit="GB/s",
            store_gb_s=statistics.median(store),
            load_gb_s_together=statistics.median(rates[Direction.LOAD] for rates in both),
            store_gb_s_together=statistics.median(rates[Direction.STORE] for rates in both),
            submit_us=statistics.median(submit) * 1e6,
            repeats=_REPEATS,
            device=str(self._device),
            gpu=gpu_name(self._device),
        )

    def _once(
        self, worker: TransferWorker, *directions: Direction, submit: list[float] | None = None
    ) -> dict[Direction, float]:
        """GB/s of a job in each direction."""
        # Each in its own half of both memories: side by side they must not touch the same blocks.
        jobs = [(direction, self._numbers(direction), self._numbers(direction)) for direction in directions]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        for direction, blocks, parts in jobs:
            worker.submit(direction, blocks, parts)
        if submit is not None:
            submit.append(time.perf_counter() - started)
        results = _wait_for(worker, len(jobs))
        return {result.direction: result.nbytes / result.seconds / 1e9 for result in results}

    def _numbers(self, direction: Direction) -> np.ndarray:
        first = self._blocks if direction is Direction.STORE else 0
        return first + self._random.permutation(self._blocks)


def _wait_for(worker: TransferWorker, count: int) -> list[TransferResult]:
    results: list[TransferResult] = []
    deadline = time.monotonic() + _LIMIT_S
    while len(results) < count:
        worker.wait(_LIMIT_S)
        results += worker.poll()
        if time.monotonic() > deadline:
            raise EngineError(f"copies of KV blocks did not end within {_LIMIT_S:g} s")
    for result in results:
        if result.error is not None:
            raise result.error
    return results
