#!/usr/bin/env python3
"""Builds the CPU engine with other constants and times small jobs by turns: what suits this machine's memory?

Each variant is the sources with some text replaced. A job is what a decode step leaves the CPU of a layer of
Qwen3-30B-A3B: a few experts of BF16 for one token, or for 16. One JSON line a variant and job: microseconds, the median
of turns, with the weights' bytes over it. Needs cmake and a C++ compiler.

Usage: PYTHONPATH=src python scripts/tune_cpu_kernels.py [--threads N] [--turns 15] [--only TEXT]
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import greenroom.experts.cpu
from greenroom import hardware
from greenroom.bench.commit import commit_hash
from greenroom.bench.result import cpu_name
from greenroom.bench.synthetic import fill_with_noise
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.store import HostStore
from greenroom.kernels.cpu import library

SOURCES = Path(library.__file__).parent
FORMAT = ExpertFormat(2048, 768, torch.bfloat16, Activation(ActivationKind.SILU))
LAYERS, EXPERTS = 4, 128
"""4.8 GB: no cache holds what comes next."""

JOBS = ((1, 1), (1, 3), (1, 8), (16, 60))
"""(tokens, experts that they use in all)."""

FEW_ROWS = "if (tokens > 2 || (BatchInvariant && M::one_sum_is_slow))"
AHEAD, HINT = "kAhead = 16384", "__builtin_prefetch(ahead, 0, 2)"
LAST_ROWS = """  for (; r < rows; ++r)
    dot_tokens<M, 1, BatchInvariant>("""


def places(count: int) -> str:
    """In front of the last rows: rows that lie a part of the unit apart are read side by side."""
    return f"""  if (tokens <= 2 && rows >= {count}) {{
    const int32_t part = rows / {count};
    for (; r < part; ++r) {{
      float sums[2 * {count}];
      dot_tokens<M, {count}, BatchInvariant>(w + r * pitch, part * pitch, x, tokens, k, sums, {count}, &stream);
      for (int32_t n = 0; n < tokens; ++n)
        for (int32_t i = 0; i < {count}; ++i) c[n * ldc + i * part + r] = sums[n * {count} + i];
    }}
    r = {count} * part;
  }}
{LAST_ROWS}"""


@dataclass(frozen=True)
class Variant:
    """replaced: pattern and text, once in each file that has it. batch_invariant: one kernel for all batches."""

    name: str
    replaced: dict[str, str] = field(default_factory=dict)
    batch_invariant: bool = False


VARIANTS = (
    Variant("as it is"),
    Variant("one kernel for all batches", batch_invariant=True),
    Variant("four rows at once", {FEW_ROWS: "if (true)"}),
    Variant("two places at once", {LAST_ROWS: places(2)}),
    Variant("four places at once", {LAST_ROWS: places(4)}),
    Variant("two places at once, no prefetch", {LAST_ROWS: places(2), HINT: "(void)ahead"}),
    Variant("four places at once, no prefetch", {LAST_ROWS: places(4), HINT: "(void)ahead"}),
    Variant("prefetch 4 KiB ahead", {AHEAD: "kAhead = 4096"}),
    Variant("prefetch 8 KiB ahead", {AHEAD: "kAhead = 8192"}),
    Variant("prefetch 32 KiB ahead", {AHEAD: "kAhead = 32768"}),
    Variant("prefetch into L1", {HINT: "__builtin_prefetch(ahead, 0, 3)"}),
    Variant("prefetch 4 KiB ahead into L1", {HINT: "__builtin_prefetch(ahead, 0, 3)", AHEAD: "kAhead = 4096"}),
    Variant("no prefetch", {HINT: "(void)ahead"}),
    Variant("four rows at once, no prefetch", {FEW_ROWS: "if (true)", HINT: "(void)ahead"}),
    Variant("smaller units", {"kUpShare = 4": "kUpShare = 8", "kDownShare = 2": "kDownShare = 4"}),
    Variant("larger units", {"kUpShare = 4": "kUpShare = 2", "kDownShare = 2": "kDownShare = 1"}),
)


def build(variant: Variant, folder: Path) -> Path:
    """The variant's library.

    Raises:
        ValueError: the sources do not have the text that it replaces.
        RuntimeError: it does not compile.
    """
    sources = folder / "sources"
    shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("*.so", "*.py", "__pycache__"))
    for before, after in variant.replaced.items():
        holding = [path for path in sources.iterdir() if before in path.read_text()]
        if not holding:
            raise ValueError(f"variant '{variant.name}': no source has '{before}'")
        for path in holding:
            path.write_text(re.sub(re.escape(before), lambda _match, text=after: text, path.read_text()))
    for command in (["cmake", "-S", sources, "-B", folder / "build"], ["cmake", "--build", folder / "build"]):
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"variant '{variant.name}': {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return next((folder / "build").glob("*.so"))


def open_engine(path: Path, threads: int, cores: list[int] | None, batch_invariant: bool) -> CpuExperts:
    with mock.patch.object(greenroom.experts.cpu, "load_library", return_value=library.load_library(path)):
        return CpuExperts(threads, cores, batch_invariant=batch_invariant)


class Jobs:
    """Random experts of a layer, another layer each time."""

    def __init__(self, store: HostStore, tokens: int, experts: int) -> None:
        self._store, self._tokens, self._experts = store, tokens, experts
        self._random = np.random.default_rng(0)
        self._hidden = torch.randn(tokens, FORMAT.hidden).to(FORMAT.dtype)
        self._out = torch.empty(tokens, FORMAT.hidden)
        self._layer = 0
        self.nbytes = experts * FORMAT.block_bytes

    def microseconds(self, engine: CpuExperts) -> float:
        """Of the last of three jobs in a row, for which threads are awake."""
        for _ in range(3):
            chosen = self._random.permutation(EXPERTS)[: self._experts].astype(np.int32)
            top_k = -(-self._experts // self._tokens)
            ids = torch.from_numpy(np.resize(chosen, self._tokens * top_k)).view(self._tokens, top_k)
            weights = torch.full(ids.shape, 1 / top_k)
            self._layer = (self._layer + 1) % LAYERS
            addresses = self._store.addresses(self._layer)
            started = time.perf_counter_ns()
            engine.run(FORMAT, addresses, self._hidden, ids, weights, self._out)
            taken = (time.perf_counter_ns() - started) / 1e3
        return taken


def measure(engines: dict[str, CpuExperts], turns: int) -> Iterator[dict[str, object]]:
    with HostStore([FORMAT] * LAYERS, [EXPERTS] * LAYERS) as store:
        fill_with_noise(store, seed=0)
        for tokens, experts in JOBS:
            jobs = Jobs(store, tokens, experts)
            taken: dict[str, list[float]] = {name: [] for name in engines}
            for _ in range(turns):
                for name, engine in engines.items():
                    taken[name].append(jobs.microseconds(engine))
            for name, times in taken.items():
                median = statistics.median(times)
                yield {
                    "variant": name,
                    "tokens": tokens,
                    "experts": experts,
                    "us": round(median, 1),
                    "least_us": round(min(times), 1),
                    "gb_s": round(jobs.nbytes / median / 1e3, 1),
                }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="by default one less than there are cores")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--only", default="", help="variants with this in their name, and the sources as they are")
    args = parser.parse_args()
    variants = [variant for variant in VARIANTS if args.only in variant.name or variant is VARIANTS[0]]
    threads, cores = hardware.engine_cores(args.threads, beside_gpu=True)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(len(hardware.usable_cores())) as pool:
        folders = [Path(name) / str(number) for number in range(len(variants))]
        libraries = list(pool.map(build, variants, folders))
        engines = {
            variant.name: open_engine(path, threads, cores, variant.batch_invariant)
            for variant, path in zip(variants, libraries, strict=True)
        }
        about = {"cpu": cpu_name(), "threads": threads, "commit": commit_hash()}
        for line in measure(engines, args.turns):
            sys.stdout.write(json.dumps(line | about) + "\n")
            sys.stdout.flush()
        for engine in engines.values():
            engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
