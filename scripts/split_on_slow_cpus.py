#!/usr/bin/env python3
"""Decode with the CPU engine slowed down, on few cores or beside a busy host: is using both lanes ever slower than one?

For each batch and slowdown, milliseconds a step with absent experts read over PCIe only, computed by the CPU only, and
by both as the split has learnt, by turns; one JSON line each. The model has random weights and nothing cached, its
routing is drawn at random. `both_over_best` is what the split costs or gains; where it exceeds 1 by more than the
spread, it lost.

Usage: PYTHONPATH=src python scripts/split_on_slow_cpus.py [--shape q30-12L] [--batch 1 16] [--slow 1 2 8 50]
       [--cores N] [--busy N]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from greenroom.bench.result import cpu_name, gpu_name
from greenroom.bench.shapes import shape_config
from greenroom.bench.synthetic import override_routing, random_model
from greenroom.config import OffloadConfig
from greenroom.engine.offload import close, offload_of
from greenroom.engine.step_runner import StepRunner
from greenroom.experts.split import PARTS, LaneTimes, SplitController

WAYS = ("pcie", "cpu", "both")
PROMPT, MOST_STEPS = 32, 512
TURNS = 5
SLOW_TURN_MS = 1500
"""A way whose turn takes longer has only one."""


class OneLane(SplitController):
    """Everything over PCIe, or nothing, whatever steps take."""

    def __init__(self, max_experts: int, streamed: bool) -> None:
        super().__init__(1.0, 1.0, max_experts)
        self._parts = (np.arange(max_experts + 1) * PARTS * streamed).astype(np.int32)

    def stream_parts(self) -> np.ndarray:
        return self._parts

    def observe(self, times: LaneTimes) -> None:
        pass


def run_steps(runner: StepRunner, steps: int) -> float:
    """Milliseconds a step."""
    started = time.perf_counter()
    for _ in range(steps):
        runner.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps * 1e3


def measure(runner: StepRunner, batch: int, most_experts: int) -> dict[str, float]:
    """By way the median of its turns; the learnt split gets some steps first to follow a change."""
    learnt, steps = runner.steps.split, 8 if batch == 1 else 3
    splits = {"pcie": OneLane(most_experts, True), "cpu": OneLane(most_experts, False), "both": learnt}
    for _ in range(14):
        runner.step()
    turns: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(TURNS):
        for way in WAYS:
            if turns[way] and turns[way][0] * steps > SLOW_TURN_MS:
                continue
            runner.steps.split = splits[way]
            runner.step()
            turns[way].append(run_steps(runner, steps))
    runner.steps.split = learnt
    return {way: statistics.median(its_turns) for way, its_turns in turns.items()}


@contextmanager
def busy_host(processes: int) -> Iterator[None]:
    """So many other processes that never rest."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def run(args: argparse.Namespace) -> int:
    """0 if both lanes were never slower than the better one by more than a twentieth."""
    config = shape_config(args.shape)
    model = random_model(config, OffloadConfig(cache_expert_num=0))
    slower = 0
    try:
        override_routing(model, "uniform")
        offload = offload_of(model)
        most = max(offload.manager.store.num_experts)
        for batch in args.batch:
            runner = StepRunner(model, batch, MOST_STEPS)
            runner.prefill(torch.randint(0, config.vocab_size, (batch, PROMPT), device=offload.device))
            for slow in args.slow:
                offload.engine.throttle(slow)
                runner.prefill(torch.randint(0, config.vocab_size, (batch, PROMPT), device=offload.device))
                ms = measure(runner, batch, most)
                ratio = ms["both"] / min(ms["pcie"], ms["cpu"])
                slower += ratio > 1.05
                line = {"bench": "split", "shape": args.shape, "batch": batch, "slow": slow, "busy": args.busy}
                line |= {f"{way}_ms": round(value, 3) for way, value in ms.items()}
                line |= {"both_over_best": round(ratio, 3), "threads": offload.engine.threads}
                line |= {"gpu": gpu_name(offload.device), "cpu": cpu_name()}
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
            offload.engine.throttle(1.0)
            runner.close()
    finally:
        close(model)
    return 1 if slower else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="q30-12L")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--slow", type=float, nargs="+", default=[1, 2, 8, 50])
    parser.add_argument("--cores", type=int, help="use only so many cores")
    parser.add_argument("--busy", type=int, default=0, help="other processes that never rest")
    args = parser.parse_args()
    with busy_host(args.busy):
        if args.cores:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
        return run(args)


if __name__ == "__main__":
    sys.exit(main())
