"""Each GPU kernel of a decode step by itself, against the memory that it reads."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from greenroom import hardware
from greenroom.bench.kernel_cases import attention_case, fetch_case, handing_over, rms_norm_case
from greenroom.bench.kernel_experts import ExpertLaunches, noise_blocks
from greenroom.bench.kernel_timing import REPEATS, Case, copy_rate, time_launches
from greenroom.bench.result import BenchResult, gpu_name
from greenroom.bench.synthetic import fill_with_noise
from greenroom.errors import ConfigError
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.store import HostStore

_FORMAT = ExpertFormat(2048, 768, torch.bfloat16, Activation(ActivationKind.SILU))
"""Qwen3-30B-A3B's."""

_EXPERTS = 128
_TOP_K = 8
_HEADS, _KEY_HEADS, _HEAD_DIM = 32, 4, 128
_POSITIONS = 4096

_POOL = 240
"""Experts on the device, 2.3 GB: launches take one set after another, so that no cache holds the next one."""

_HOST_POOL = 60


@dataclass(frozen=True, kw_only=True)
class KernelBenchmark(BenchResult):
    """One kernel at one shape.

    value: microseconds a launch, the median of ``repeats`` graphs of ``launches`` launches each, and so with the gap
    between two kernels. bytes: what it must read and write, each once; None for kernels that move next to nothing.
    gb_s: those bytes a second, in 10^9. bound: microseconds that they take at ``limit_gb_s``, the rate of a large
    copy in the same run: on the device, counting both directions ("hbm"), or from page-locked memory ("pcie").
    share: bound / value. cache_expert_num: experts of a launch that are resident.
    """

    kernel: str
    batch: int
    tokens: int
    cache_expert_num: int
    routing: str
    bytes: int | None
    gb_s: float | None
    limit: str | None
    limit_gb_s: float | None
    share: float | None
    launches: int


def bench_kernels() -> Iterator[KernelBenchmark]:
    """Every kernel at its shapes, one after another. Takes 5 GB of device memory.

    Raises:
        ConfigError: no GPU.
    """
    if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
        raise ConfigError("the kernel benchmark needs a GPU that torch can use, and triton")
    return _measure_all(torch.device("cuda", torch.cuda.current_device()))


def _measure_all(device: torch.device) -> Iterator[KernelBenchmark]:
    limits = {name: copy_rate(name, device) for name in ("hbm", "pcie")}
    for case in _cases(device):
        microseconds, launches = time_launches(case.launches, case.nbytes)
        limit = limits[case.limit] if case.limit else None
        bound = case.nbytes / limit / 1e3 if case.nbytes and limit else None
        yield KernelBenchmark(
            bench="kernels",
            kernel=case.kernel,
            shape=case.shape,
            batch=case.tokens,
            tokens=case.tokens,
            cache_expert_num=case.experts,
            routing="fixed",
            value=microseconds,
            unit="us",
            bound=bound,
            bytes=case.nbytes,
            gb_s=case.nbytes / microseconds / 1e3 if case.nbytes else None,
            limit=case.limit,
            limit_gb_s=limit,
            share=bound / microseconds if bound else None,
            launches=launches,
            repeats=REPEATS,
            device=str(device),
            gpu=gpu_name(device),
        )


def _cases(device: torch.device) -> Iterator[Case]:
    blocks = noise_blocks(_FORMAT, _POOL, device)
    for tokens, experts in ((1, _TOP_K), (16, 80)):
        yield from ExpertLaunches(_FORMAT, blocks, experts, tokens, _TOP_K).cases()
    del blocks
    with HostStore([_FORMAT], [_HOST_POOL], hardware.lock_pages, hardware.unlock_pages) as store:
        fill_with_noise(store, seed=0)
        for experts in (2, 20):
            yield fetch_case(store, experts, device)
        torch.cuda.synchronize(device)
    for rows in (1, 16, 4096):
        yield rms_norm_case(rows, _FORMAT.hidden, device)
    for batch in (1, 16):
        yield attention_case(batch, _HEADS, _KEY_HEADS, _HEAD_DIM, _POSITIONS, device)
    for tokens in (1, 16):
        with handing_over(_FORMAT, _EXPERTS, tokens, _TOP_K, device) as cases:
            yield from cases
