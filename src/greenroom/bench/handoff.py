"""What it costs a layer of a decode step that its experts are handed to the CPU engine, and their sum back."""

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from greenroom import hardware
from greenroom.bench.result import LayersResult, gpu_name
from greenroom.bench.synthetic import fill_with_noise
from greenroom.errors import ConfigError, EngineError
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.cuda_tier import CudaTier
from greenroom.experts.dispatch import CostModel
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.host_tier import HostTier
from greenroom.experts.mailbox import Mailboxes
from greenroom.experts.manager import OffloadManager
from greenroom.experts.native import Isa
from greenroom.experts.policies import make_policy
from greenroom.experts.split import SplitController
from greenroom.experts.store import HostStore
from greenroom.experts.tier import DeviceTier
from greenroom.watchdog import wait_until

if TYPE_CHECKING:
    from greenroom.experts.decode_steps import DecodeSteps

_FORMAT = ExpertFormat(64, 32, torch.bfloat16, Activation(ActivationKind.SILU))
_EXPERTS = 8
_TOP_K = 2
_MOST_SEQUENCES = 32
_WARM_UP = 5
_WATCHDOG_S = 30.0


@dataclass(frozen=True, kw_only=True)
class HandoffBenchmark(LayersResult):
    """Medians of ``repeats`` means of ``tokens`` decode steps each, of layers whose experts are next to nothing.

    value: microseconds a layer, ``handed_over_us - resident_us``. handed_over_us: with every expert on the CPU.
    resident_us: with every expert on the device, whose tiny experts count here.
    busy_ns: of one layer on the CPU, from seeing the request to raising done; a part of ``handed_over_us``.
    graph: whether the layers were replayed as one CUDA graph.
    """

    handed_over_us: float
    resident_us: float
    busy_ns: float
    graph: bool


def bench_handoff(
    batch: int = 1,
    layers: int = 48,
    threads: int | None = None,
    isa: str = "auto",
    repeats: int = 5,
    steps: int = 50,
) -> HandoffBenchmark:
    """Times steps of ``layers`` layers, once with everything on the CPU and once with everything on the device.

    On a GPU a step is one CUDA graph, timed by the device's clock. Without one it runs eagerly, which is for tests
    of this benchmark alone.

    Raises:
        ConfigError: a number out of range; no GPU and no interpreter of GPU kernels.
    """
    for name, count, most in (("batch", batch, _MOST_SEQUENCES), ("layers", layers, 1024), ("steps", steps, 10**6)):
        if not 1 <= count <= most:
            raise ConfigError(f"{name} must be 1 to {most}, not {count}")
    device = _device()
    chosen_isa = Isa.parse(isa)
    count, cores = hardware.engine_cores(threads, beside_gpu=device.type == "cuda")
    with CpuExperts(count, cores, chosen_isa) as engine:
        with _layers(engine, device, batch, layers, slots=0) as (manager, decode):
            handed_over, busy_ns = _measure(manager, decode, device, batch, repeats, steps)
            _require(manager, hits=0, streamed=0)
        with _layers(engine, device, batch, layers, slots=_EXPERTS) as (manager, decode):
            resident, _ = _measure(manager, decode, device, batch, repeats, steps)
            _require(manager, misses=0)
        return HandoffBenchmark(
            bench="handoff",
            shape=f"{layers} layers, hidden {_FORMAT.hidden}, inter {_FORMAT.inter}, {_TOP_K} of {_EXPERTS} experts",
            batch=batch,
            tokens=steps,
            cache_expert_num=0,
            routing="uniform",
            value=(handed_over - resident) / layers,
            unit="us/layer",
            handed_over_us=handed_over / layers,
            resident_us=resident / layers,
            busy_ns=busy_ns,
            repeats=repeats,
            graph=device.type == "cuda",
            threads=engine.threads,
            isa=engine.isa.label,
            device=str(device),
            gpu=gpu_name(device),
        )


def _device() -> torch.device:
    if importlib.util.find_spec("triton") is not None:
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        if os.environ.get("TRITON_INTERPRET") == "1":
            return torch.device("cpu")
    raise ConfigError("the handoff benchmark needs a GPU that torch can use, and triton")


@contextmanager
def _layers(
    engine: CpuExperts, device: torch.device, batch: int, layers: int, slots: int
) -> Iterator[tuple[OffloadManager, "DecodeSteps"]]:
    """Layers with ``slots`` cache slots each, whose absent experts all go to the CPU."""
    from greenroom.experts.decode_path import DecodePath  # needs triton, which only GPU builds of torch bring
    from greenroom.experts.decode_steps import DecodeSteps

    on_gpu = device.type == "cuda"
    lock = hardware.page_locks(on_gpu)
    formats, experts, all_slots = [_FORMAT] * layers, [_EXPERTS] * layers, [slots] * layers
    # The manager closes both store and tier.
    store = HostStore(formats, experts, *lock)
    try:
        fill_with_noise(store, seed=0)
        tier: DeviceTier
        tier = CudaTier(store, all_slots, engine, 1, device) if on_gpu else HostTier(store, all_slots, engine, 1)
        costs = CostModel(copy_bytes_per_s=0, cpu_bytes_per_s=1, cpu_flops_per_s=1)
        manager = OffloadManager(store, tier, all_slots, make_policy("lfru"), _TOP_K, 0, costs)
    except BaseException:
        store.close()
        raise
    with manager:
        boxes = Mailboxes(engine, store, batch, _TOP_K, pin_memory=on_gpu)
        try:
            path = DecodePath(store, tier.slots, boxes, batch, _TOP_K)
            decode = DecodeSteps(manager, path)
            decode.split = SplitController(float("inf"), 1.0, _EXPERTS)
            yield manager, decode
        finally:
            if on_gpu:
                torch.cuda.synchronize(device)
            boxes.close()


def _measure(
    manager: OffloadManager, decode: "DecodeSteps", device: torch.device, batch: int, repeats: int, steps: int
) -> tuple[float, float]:
    """(microseconds a step, nanoseconds of a layer on the CPU)."""
    layers = len(manager.store)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch, _FORMAT.hidden, generator=generator).to(_FORMAT.dtype).to(device)
    ids = torch.rand(layers, batch, _EXPERTS, generator=generator).argsort(-1)[..., :_TOP_K].contiguous().to(device)
    weights = torch.full((batch, _TOP_K), 1 / _TOP_K, device=device)

    def all_layers() -> None:
        state = hidden
        for layer in range(layers):
            state = decode.path.run(layer, state, ids[layer], weights)

    if device.type == "cuda":
        _step(decode, batch, device, all_layers)  # compiles the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            all_layers()
        work: Callable[[], None] = graph.replay
    else:
        work = all_layers
    for _ in range(_WARM_UP):
        _step(decode, batch, device, work)
    means, busy = [], []
    for _ in range(repeats):
        seconds = []
        for _ in range(steps):
            seconds.append(_step(decode, batch, device, work))
            busy.append(decode.path.mailboxes.busy_ns[:, 0].clone())
        means.append(statistics.fmean(seconds) * 1e6)
    decode.flush()
    return statistics.median(means), float(np.median(torch.stack(busy).numpy()))


def _step(decode: "DecodeSteps", batch: int, device: torch.device, work: Callable[[], None]) -> float:
    """Seconds of one step's work: on a GPU by its own clock, from its begin on."""
    decode.begin(batch)
    try:
        if device.type != "cuda":
            started = time.perf_counter()
            work()
            seconds = time.perf_counter() - started
            decode.enqueued()
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            decode.enqueued()
            wait_until(end.query, _WATCHDOG_S, "the step did not end")
            seconds = begin.elapsed_time(end) / 1e3
    except BaseException as error:
        where = decode.abandon()
        if isinstance(error, TimeoutError):
            raise EngineError(f"{where} within {_WATCHDOG_S:g} s") from error
        raise
    decode.finish()
    return seconds


def _require(manager: OffloadManager, **counts: int) -> None:
    """Experts ran where the figures say."""
    total = manager.counters.total().to_dict()
    for name, expected in counts.items():
        if total[name] != expected:
            raise EngineError(f"the benchmark counted {total[name]} {name} where there must be {expected}")
