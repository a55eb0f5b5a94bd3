"""How fast a checkpoint is loaded, and what memory that takes."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from greenroom.bench.random_checkpoint import write_checkpoint
from greenroom.bench.result import LayersResult, gpu_name
from greenroom.bench.shapes import shape_config
from greenroom.config import OffloadConfig
from greenroom.engine.loader import load
from greenroom.engine.offload import close, stats
from greenroom.engine.request import choose_device
from greenroom.errors import ConfigError, GreenroomError

_EXIT_REFUSED = 2


@dataclass(frozen=True, kw_only=True)
class LoadBenchmark(LayersResult):
    """``repeats`` loads, each in a process of its own.

    value: ``checkpoint_bytes`` a second in 10^9, of the median of ``load_seconds``, which begin with the call of
    ``greenroom.load`` (its libraries are imported by then) and end when the model is ready.
    checkpoint_bytes: of all tensors. host_bytes: of the experts in host memory.
    peak_rss_bytes: most memory that the process ever had resident, the largest of all loads; base_rss_bytes: what
    it had before the call, so the libraries'. peak_over_model: ``peak_rss_bytes / checkpoint_bytes``.
    """

    load_seconds: list[float]
    checkpoint_bytes: int
    host_bytes: int
    peak_rss_bytes: int
    base_rss_bytes: int
    peak_over_model: float
    page_locked: bool


def bench_load(
    shape: str, folder: Path | None = None, device: str = "auto", repeats: int = 3, progress: bool = False
) -> LoadBenchmark:
    """Loads a random checkpoint of ``shape`` with no expert cached.

    Nothing is dropped from the page cache: what was just written is read from memory if that is large enough.

    Args:
        folder: where the checkpoint is or will be, and stays; None for a temporary one.
        progress: show a bar on stderr while writing.

    Raises:
        ConfigError: an unknown shape or device, a folder that holds something else, or a disk that is too small.
        GreenroomError: what ``greenroom.load`` refused.
    """
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, not {repeats}")
    config = shape_config(shape)
    choose_device(OffloadConfig(device=device).device)  # refuses one that is not there before anything is written
    temporary = tempfile.TemporaryDirectory(prefix="greenroom-bench-") if folder is None else None
    with temporary or nullcontext():
        place = Path(temporary.name) if temporary else Path(folder or "")
        model_bytes = write_checkpoint(config, place, shape, progress)
        loads = [_load_in_child(place, device) for _ in range(repeats)]
    last, peak = loads[-1], max(load["peak_rss_bytes"] for load in loads)
    return LoadBenchmark(
        bench="load",
        shape=shape,
        batch=0,
        tokens=0,
        cache_expert_num=last["cache_expert_num"],
        routing="none",
        value=model_bytes / statistics.median(load["seconds"] for load in loads) / 1e9,
        unit="GB/s",
        load_seconds=[load["seconds"] for load in loads],
        checkpoint_bytes=model_bytes,
        host_bytes=last["host_bytes"],
        peak_rss_bytes=peak,
        base_rss_bytes=max(load["base_rss_bytes"] for load in loads),
        peak_over_model=peak / model_bytes,
        page_locked=last["page_locked"],
        repeats=repeats,
        threads=last["threads"],
        isa=last["isa"],
        device=last["device"],
        gpu=last["gpu"],
    )


def _load_in_child(folder: Path, device: str) -> dict[str, Any]:
    """One load in a process of its own, whose peak memory is that of this load alone."""
    code = "from greenroom.bench.load import report_load; report_load()"
    done = subprocess.run([sys.executable, "-c", code, str(folder), device], capture_output=True, text=True)
    if done.returncode == _EXIT_REFUSED:
        raise GreenroomError(done.stderr.strip().splitlines()[-1])
    if done.returncode != 0:
        raise RuntimeError(f"loading ended with exit code {done.returncode}:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def report_load() -> None:
    """Loads the folder in ``sys.argv[1]`` on the device in ``sys.argv[2]`` and writes figures as JSON to stdout."""
    folder, device = sys.argv[1:]
    base = _status_bytes("VmRSS")
    started = time.perf_counter()
    try:
        model, _ = load(folder, progress=False, config=OffloadConfig(cache_expert_num=0, device=device))
    except GreenroomError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(_EXIT_REFUSED) from error
    seconds = time.perf_counter() - started
    peak, after = _status_bytes("VmHWM"), stats(model)
    figures = {
        "seconds": seconds,
        "peak_rss_bytes": peak,
        "base_rss_bytes": base,
        "host_bytes": after.host_bytes,
        "page_locked": after.page_locked,
        "cache_expert_num": after.cache_expert_num,
        "threads": after.threads,
        "isa": after.isa,
        "device": after.device,
        "gpu": gpu_name(model.device),
    }
    close(model)
    sys.stdout.write(f"{json.dumps(figures)}\n")


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024
