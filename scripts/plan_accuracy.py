#!/usr/bin/env python3
"""What ``greenroom plan`` says of a server, against one that is then opened: memory held, and speed.

Each setting runs in a process of its own, so that what the first one loads is not missing from the others; the
machine's rates are measured in one more before them. One JSON line a setting. Exit status 1 if memory differs by more
than 5% or a rate of decode by more than 25%.

Usage: PYTHONPATH=src python scripts/plan_accuracy.py [--shape q30-12L] [--setting NAME] [--device auto]
"""

import argparse
import json
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from greenroom import hardware
from greenroom.bench.byte_tokenizer import byte_tokenizer
from greenroom.bench.commit import commit_hash
from greenroom.bench.machine import machine_rates
from greenroom.bench.result import gpu_name
from greenroom.bench.served import ServedDecode
from greenroom.bench.shapes import shape_config
from greenroom.bench.synthetic import override_routing, random_model
from greenroom.config import OffloadConfig
from greenroom.engine.demand import Demand
from greenroom.engine.held_memory import DeviceMemory
from greenroom.engine.model_shape import ModelShape, probe_shape
from greenroom.engine.offload import close, offload_of
from greenroom.engine.plan import Machine, ModelPlan, plan_model
from greenroom.engine.request import choose_device, weights_config
from greenroom.engine.sizes import KV_BLOCK
from greenroom.engine.speed import Rates
from greenroom.serving.engine import ServingEngine
from greenroom.serving.open import open_engine
from greenroom.serving.requests import Failed, SamplingParams

CONTEXT = 4096
"""Tokens of each sequence."""

PROMPTS = (512, 2048)
"""Tokens of the prompts whose prefill is timed."""

DECODE_CONTEXT, DECODE_STEPS = 64, 16
"""Tokens of each sequence before decode is timed; steps of a timed run."""

WARM_UP, REPEATS = 2, 5
LIMIT_S = 120.0
MEMORY_TOLERANCE, DECODE_TOLERANCE = 0.05, 0.25
MEMORY, SPEED = ("planned", "held"), ("predicted", "measured")
"""What the two numbers of a comparison are called."""


@dataclass(frozen=True)
class Setting:
    """cached: whether every expert has a slot, or none. knobs: further ones of ``OffloadConfig``."""

    concurrency: int
    cached: bool
    knobs: dict[str, Any]

    def config(self, model: PretrainedConfig, device: str) -> OffloadConfig:
        return OffloadConfig(cache_expert_num=model.num_experts if self.cached else 0, device=device, **self.knobs)


SETTINGS = {
    "nothing-cached": Setting(16, False, {}),
    "all-cached": Setting(8, True, {}),
    "attention-prefetched": Setting(1, False, {"weights_offload_params": "self_attn", "weights_offload_group_size": 1}),
}


def compare(planned: float, found: float, names: tuple[str, str]) -> dict[str, float]:
    """Both, by their names, and how many times the former the latter is."""
    return {names[0]: planned, names[1]: found, "ratio": found / planned}


def make_plans(shape: ModelShape, setting: Setting, config: OffloadConfig, rates: Rates) -> dict[int, ModelPlan]:
    """As ``greenroom plan`` makes them, one for each length of a prompt."""
    device = choose_device(config.device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    machine = Machine(free, hardware.available_host_bytes())
    demand = Demand(CONTEXT, setting.concurrency, serving=True)
    weights = weights_config(config)
    return {
        tokens: plan_model(shape, config, weights, demand, machine, rates, prompt_tokens=tokens) for tokens in PROMPTS
    }


def planned_host_bytes(plan: ModelPlan) -> int:
    """Without a GPU not what is kept for KV cache and activations: it is filled as requests come."""
    total = sum(plan.host_parts.values())
    return total if plan.machine.device_bytes is not None else total - plan.working.total


def compare_memory(model: PreTrainedModel, plan: ModelPlan, before: DeviceMemory | None) -> dict[str, Any]:
    """What is held now, as ``serve`` reports it, and of the device's memory what the driver has given away since."""
    held = offload_of(model).memory(model)
    result: dict[str, Any] = {
        "device": None,
        "driver": None,
        "host": compare(planned_host_bytes(plan), held.host, MEMORY),
    }
    now = DeviceMemory.read(model.device)
    if held.device is not None and before is not None and now is not None:
        planned = sum(plan.device_parts.values())
        result["device"] = compare(planned, held.device, MEMORY)
        result["driver"] = compare(planned, before.free - now.free, MEMORY)
    return result


def median_rate(tokens: int, seconds: Callable[[], float]) -> float:
    """Tokens a second, of several runs after some that warm up."""
    for _ in range(WARM_UP):
        seconds()
    return tokens / statistics.median(seconds() for _ in range(REPEATS))


def first_token_s(engine: ServingEngine, prompt: list[int]) -> float:
    """From the request to its only token."""
    events: queue.Queue[Any] = queue.Queue()
    started = time.perf_counter()
    engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True), events.put)
    first = events.get(timeout=LIMIT_S)
    seconds = time.perf_counter() - started
    if isinstance(first, Failed):
        raise first.error
    events.get(timeout=LIMIT_S)
    return seconds


def compare_prefill(engine: ServingEngine, plan: ModelPlan) -> dict[str, float]:
    """Of prompts that are different each time, so that none is found in the KV cache."""
    tokens = plan.prompt_tokens

    def seconds() -> float:
        return first_token_s(engine, torch.randint(0, engine.vocabulary, (tokens,)).tolist())

    return compare(plan.prefill, median_rate(tokens, seconds), SPEED)


def decode_tok_s(model: PreTrainedModel, batch: int) -> float:
    """Of bare steps, which are what is predicted, as ``serve`` runs them."""
    served = ServedDecode(model, batch, DECODE_CONTEXT, DECODE_STEPS * (WARM_UP + REPEATS), "off")

    def seconds() -> float:
        started = time.perf_counter()
        for _ in range(DECODE_STEPS):
            served.step()  # gives back tokens, so it has ended
        return time.perf_counter() - started

    try:
        return median_rate(batch * DECODE_STEPS, seconds)
    finally:
        served.close()


def measure(name: str, shape_name: str, device: str, rates_file: Path) -> dict[str, Any]:
    """One setting, in a process that has done nothing else."""
    setting, hf_config = SETTINGS[name], shape_config(shape_name)
    config = setting.config(hf_config, device)
    rates = machine_rates(choose_device(device).type == "cuda", file=rates_file)
    before = DeviceMemory.read(choose_device(device))
    plans = make_plans(probe_shape(hf_config, torch.bfloat16), setting, config, rates)
    plan = plans[PROMPTS[0]]
    model = random_model(hf_config, config)
    try:
        engine = open_engine(
            model,
            byte_tokenizer(),
            num_blocks=setting.concurrency * -(-CONTEXT // KV_BLOCK),
            max_context=CONTEXT,
            max_step_tokens=plan.demand.pass_tokens,
            max_sequences=setting.concurrency,
        )
        try:
            memory = compare_memory(model, plan, before)
            # Behind that: its table takes memory as well. Prefill asks for it each time, decode is captured anew below.
            override_routing(model, "uniform")
            prefill = {f"prefill_{tokens}": compare_prefill(engine, plans[tokens]) for tokens in PROMPTS}
            later = offload_of(model).memory(model).device
        finally:
            engine.close()
        decode = {
            f"decode_{batch}": compare(predicted, decode_tok_s(model, batch), SPEED)
            for batch, predicted in {1: plan.decode_one, setting.concurrency: plan.decode_all}.items()
        }
    finally:
        close(model)
    return {
        "setting": name,
        "shape": shape_name,
        "context": CONTEXT,
        "concurrency": setting.concurrency,
        "cache_expert_num": max(plan.memory.num_slots),
        "weights_offload": str(plan.selection),
        **memory,
        "device_held_after_prefill": later,
        "device_parts": plan.device_parts,
        **decode,
        **prefill,
        "rates": asdict(rates),
        "off": [*too_far(memory, MEMORY_TOLERANCE), *too_far(decode, DECODE_TOLERANCE)],
        "gpu": gpu_name(choose_device(device)),
        "commit": commit_hash(),
    }


def too_far(compared: dict[str, Any], tolerance: float) -> list[str]:
    """Names of what differs by more than that."""
    return [name for name, each in compared.items() if each is not None and abs(each["ratio"] - 1) > tolerance]


def run_children(arguments: argparse.Namespace, rates_file: Path) -> int:
    """The rates, then every setting that was asked for; returns the exit status."""
    settings = [arguments.setting] if arguments.setting else [*SETTINGS]
    fixed = [sys.executable, __file__, "--shape", arguments.shape, "--device", arguments.device]

    def run(*flags: str) -> bool:
        return subprocess.run([*fixed, "--rates", str(rates_file), *flags], check=False).returncode == 0

    if not run("--measure-rates"):
        return 1
    failed = [name for name in settings if not run("--setting", name)]  # all of them, whatever the first one says
    return int(bool(failed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="q30-12L")
    parser.add_argument("--setting", choices=[*SETTINGS], help="only this one")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--rates", type=Path, metavar="FILE", help="runs --setting in this process, with rates from FILE"
    )
    parser.add_argument("--measure-rates", action="store_true", help="writes --rates, and nothing else")
    arguments = parser.parse_args()
    if arguments.rates is None:
        with tempfile.TemporaryDirectory(prefix="greenroom-plan-") as folder:
            return run_children(arguments, Path(folder) / "rates.json")
    if arguments.measure_rates:
        machine_rates(choose_device(arguments.device).type == "cuda", file=arguments.rates)
        return 0
    result = measure(arguments.setting, arguments.shape, arguments.device, arguments.rates)
    print(json.dumps(result), flush=True)
    return int(bool(result["off"]))


if __name__ == "__main__":
    sys.exit(main())
