"""What this machine gives: expert bytes a second over each lane, alone and both at once."""

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from greenroom import hardware, numa
from greenroom.bench.result import BenchResult, gpu_name
from greenroom.bench.synthetic import fill_with_noise
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.native import Isa
from greenroom.experts.store import HostStore

_FORMAT = ExpertFormat(2048, 768, torch.bfloat16, Activation(ActivationKind.SILU))
_EXPERTS = 128
_TOP_K = 8
_JOBS = 24
_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Bandwidth(BenchResult):
    """GB/s of expert weights. What needs a GPU is None on a machine without one.

    value: of both lanes at once, or of the CPU engine where it is the only one.
    cpu_alone: the CPU engine, one token of 8 random experts a job. copy: page-locked host memory to the
    device, an expert at a time, alone. *_together: each while the other runs.
    """

    cpu_alone: float
    copy: float | None
    cpu_together: float | None
    copy_together: float | None
    threads: int
    isa: str
    expert_bytes: int


def measure_bandwidth(threads: int | None = None, isa: str = "auto") -> Bandwidth:
    """Takes a few seconds and 1.2 GB of host memory.

    Args:
        threads: of the CPU engine; None for its default on this machine.
    """
    on_gpu = torch.cuda.is_available()
    count, cores = hardware.engine_cores(threads, beside_gpu=on_gpu)
    lock, unlock = hardware.page_locks(on_gpu)
    with (
        HostStore([_FORMAT], [_EXPERTS], lock, unlock, homes=numa.engine_homes()) as store,
        CpuExperts(count, cores, Isa.parse(isa)) as engine,
    ):
        fill_with_noise(store, seed=0)
        lanes = _Lanes(store, engine)
        cpu = lanes.median(cpu=True, copy=False)[0]
        copy = lanes.median(cpu=False, copy=True)[1] if on_gpu else None
        together = lanes.median(cpu=True, copy=True) if on_gpu else None
        return Bandwidth(
            bench="bandwidth",
            value=sum(together) if together else cpu,
            unit="GB/s",
            repeats=_REPEATS,
            device=str(lanes.device),
            gpu=gpu_name(lanes.device),
            cpu_alone=cpu,
            copy=copy,
            cpu_together=together[0] if together else None,
            copy_together=together[1] if together else None,
            threads=count,
            isa=engine.isa.label,
            expert_bytes=_FORMAT.block_bytes,
        )


class _Lanes:
    """Jobs for the CPU engine and copies to the device over the same store."""

    def __init__(self, store: HostStore, engine: CpuExperts) -> None:
        self._store, self._engine = store, engine
        self._random = np.random.default_rng(0)
        self._hidden = torch.randn(1, _FORMAT.hidden).to(_FORMAT.dtype)
        self._weights = torch.full((1, _TOP_K), 1 / _TOP_K)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._target = torch.empty(2, _FORMAT.block_bytes, dtype=torch.uint8, device=self.device)

    def median(self, cpu: bool, copy: bool) -> tuple[float, float]:
        """(CPU GB/s, copy GB/s) of the lanes that run; 0 for the other."""
        rates = [self._once(cpu, copy) for _ in range(_REPEATS + 1)][1:]
        return statistics.median(r[0] for r in rates), statistics.median(r[1] for r in rates)

    def _once(self, cpu: bool, copy: bool) -> tuple[float, float]:
        if copy:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for expert in self._random.integers(0, _EXPERTS, _JOBS * _TOP_K // 2):
                self._target[int(expert) % 2].copy_(self._store.blocks(0)[int(expert)], non_blocking=True)
            end.record()
        started = time.perf_counter()
        for _ in range(_JOBS if cpu else 0):
            ids = torch.from_numpy(self._random.permutation(_EXPERTS)[:_TOP_K].astype(np.int32)).view(1, -1)
            out = torch.empty(1, _FORMAT.hidden)
            addresses = self._store.addresses(0)
            self._engine.run(_FORMAT, addresses, self._hidden, ids, self._weights, out)
        cpu_rate = _JOBS * _TOP_K * _FORMAT.block_bytes / (time.perf_counter() - started) / 1e9 if cpu else 0.0
        copy_rate = 0.0
        if copy:
            end.synchronize()
            copy_rate = _JOBS * _TOP_K // 2 * _FORMAT.block_bytes / begin.elapsed_time(end) / 1e6
        return cpu_rate, copy_rate
