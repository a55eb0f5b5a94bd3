"""The rates that predictions start from: measured once a machine and kept in the user's cache folder."""

import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from greenroom import hardware, numa
from greenroom.bench.bandwidth import measure_bandwidth
from greenroom.bench.result import cpu_name
from greenroom.bench.synthetic import fill_with_noise
from greenroom.engine.single.linears import torch_multiplies
from greenroom.engine.speed import Rates
from greenroom.errors import ConfigError
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.native import Isa
from greenroom.experts.store import HostStore

logger = logging.getLogger(__name__)

_VERSION = 2
"""Of what is measured, so that older files are measured again."""

_REPEATS = 5

_CPU = torch.device("cpu")

FLOP_PER_BYTE = 45
"""Of a CPU that was not measured: what its cores compute while they read one byte. 49 and 45 on two Xeons with AMX."""

ASSUMED_PCIE_GB_S = 25.0
ASSUMED_GPU_GB_S, ASSUMED_GPU_TFLOP_S = 1000.0, 100.0
"""Of a GPU that is not there to be measured: PCIe 4, and the memory and cores of a large consumer card."""


def cache_file() -> Path:
    """Where measured rates are kept."""
    return Path.home() / ".cache" / "greenroom" / "rates.json"


def machine_rates(on_gpu: bool, threads: int | None = None, file: Path | None = None, again: bool = False) -> Rates:
    """This machine's rates: from ``file`` if they were measured before, else measured (some seconds) and kept there.

    Args:
        on_gpu: whether the model is to run on a GPU. One that is not there is assumed.
        threads: of the CPU engine.
        again: measure in any case.
    """
    file = file or cache_file()
    measured_gpu = on_gpu and torch.cuda.is_available()
    key = _machine_key(measured_gpu, threads)
    known = _read(file)
    if again or key not in known:
        known[key] = asdict(_measure(measured_gpu, threads))
        _keep(known, file)
    rates = Rates(**known[key])
    return rates if measured_gpu or not on_gpu else assume_gpu(rates)


def _keep(known: dict[str, Any], file: Path) -> None:
    """For the next time. A folder that cannot be written costs that time another measurement, and this one nothing."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # A reader never sees half a file.
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(known, indent=1))
        temporary.replace(file)
    except OSError as error:
        logger.warning("the measured rates are not kept for the next time: %s", error)


def given_rates(cpu_gb_s: float, pcie_gb_s: float | None) -> Rates:
    """Of a machine of which only bandwidths are known; the rest is assumed.

    pcie_gb_s: None without a GPU.
    """
    tflops = cpu_gb_s * FLOP_PER_BYTE / 1e3
    if pcie_gb_s is None:
        return Rates(cpu_gb_s, tflops, None, cpu_gb_s / 2, tflops, "assumed")
    return Rates(cpu_gb_s, tflops, pcie_gb_s, ASSUMED_GPU_GB_S, ASSUMED_GPU_TFLOP_S, "assumed")


def assume_gpu(rates: Rates) -> Rates:
    """A measured CPU beside an assumed GPU."""
    return Rates(
        rates.cpu_gb_s,
        rates.cpu_tflop_s,
        ASSUMED_PCIE_GB_S,
        ASSUMED_GPU_GB_S,
        ASSUMED_GPU_TFLOP_S,
        f"CPU {rates.source}, GPU assumed",
    )


def _machine_key(on_gpu: bool, threads: int | None) -> str:
    count, _ = hardware.engine_cores(threads, beside_gpu=on_gpu)
    gpu = torch.cuda.get_device_name() if on_gpu else "no GPU"
    return f"{cpu_name()}, {count} threads, {gpu}, torch {torch.__version__}, {_VERSION}"


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """What was measured before; nothing if the file is not there or not ours."""
    try:
        known = json.loads(file.read_text())
        return {key: value for key, value in known.items() if Rates(**value)}
    except (OSError, ValueError, TypeError, AttributeError, ConfigError):
        return {}


def _measure(on_gpu: bool, threads: int | None) -> Rates:
    lanes = measure_bandwidth(threads)
    cpu = lanes.cpu_together if on_gpu else lanes.cpu_alone
    assert cpu is not None
    device = torch.device("cuda" if on_gpu else "cpu")
    count, cores = hardware.engine_cores(threads, beside_gpu=on_gpu)
    # As ``load`` would make it.
    with CpuExperts(count, cores, Isa.AUTO, batch_invariant=not on_gpu, callers_help=not on_gpu) as engine:
        return Rates(
            cpu_gb_s=cpu,
            cpu_tflop_s=_expert_tflop_s(engine),
            pcie_gb_s=lanes.copy_together if on_gpu else None,
            dense_gb_s=_dense_gb_s(device, engine),
            dense_tflop_s=_dense_tflop_s(device, engine),
            source="measured",
        )


def _expert_tflop_s(engine: CpuExperts) -> float:
    """Of a batch with 64 tokens an expert."""
    experts, top_k, tokens = 16, 4, 256
    fmt = ExpertFormat(2048, 768, torch.bfloat16, Activation(ActivationKind.SILU))
    hidden, out = torch.randn(tokens, fmt.hidden).to(fmt.dtype), torch.empty(tokens, fmt.hidden)
    ids = torch.rand(tokens, experts).topk(top_k).indices.to(torch.int32)
    weights = torch.rand(tokens, top_k)
    with HostStore([fmt], [experts], homes=numa.engine_homes()) as store:
        fill_with_noise(store, seed=0)
        addresses = store.addresses(0)
        seconds = _seconds(lambda: engine.run(fmt, addresses, hidden, ids, weights, out), _CPU)
    return fmt.flops(tokens * top_k) / seconds / 1e12


def _dense_gb_s(device: torch.device, engine: CpuExperts) -> float:
    """On a GPU a large copy, both directions counted; on a CPU a matrix with one row of activations."""
    if device.type == "cuda":
        source = torch.randint(1 << 30, (1 << 28,), dtype=torch.int32, device=device)
        target = torch.empty_like(source)
        return 2 * source.numel() * 4 / _seconds(lambda: target.copy_(source), device) / 1e9
    weight = torch.randn(1 << 15, 2048).to(torch.bfloat16)
    row = torch.randn(1, 2048).to(torch.bfloat16)
    return weight.numel() * 2 / _seconds(lambda: engine.linear(weight, row), device) / 1e9


def _dense_tflop_s(device: torch.device, engine: CpuExperts) -> float:
    size = 8192 if device.type == "cuda" else 1024
    rows, weight = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    by_torch = device.type == "cuda" or torch_multiplies(torch.bfloat16)
    seconds = _seconds(lambda: F.linear(rows, weight) if by_torch else engine.linear(weight, rows), device)
    return 2 * size**3 / seconds / 1e12


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median of some runs."""

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(_REPEATS + 1):
        settle()
        started = time.perf_counter()
        work()
        settle()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
