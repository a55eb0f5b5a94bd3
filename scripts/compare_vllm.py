#!/usr/bin/env python3
"""vLLM without the plugin and with it: speed, and greedy tokens. JSON lines on stdout.

speed ENGINE...  all engines start at once, since a start takes a minute, and are timed one after another. Decode is the
                 time of all tokens less that of the first, prefill the time to the first token; of each the best of
                 some runs. Engines: stock (all on the GPU), uva (experts in host memory by vLLM's own means),
                 plugin:SLOTS (so many experts of each layer on the GPU), plugin:SLOTS:GPUS (tensor parallel).
                 With --turns those that keep all experts on one GPU then decode and prefill by turns, each with some of
                 the cores, which go round from turn to turn: two stock ones show how far figures stray. What their
                 decode steps do is counted, too: calls of Python functions, kernels, and the time of these.
tokens           greedy tokens in float32: stock on one GPU, then the plugin for each number of slots. Exit status 1 if
                 a text parts from stock's where that holds its own token for clearly likelier: some of vLLM's kernels
                 compute float32 in TF32, so as good as equal ones may change places.

Usage: PYTHONPATH=src python scripts/compare_vllm.py speed uva plugin:0 stock plugin:128 stock --turns 11
       PYTHONPATH=src python scripts/compare_vllm.py tokens --tp 2 --slots 8 0
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_child import Answer, ChildEngine
from vllm_engines import (
    PROMPT,
    claim_stdout,
    common_arguments,
    expert_gib,
    made_up_arguments,
    measured_with,
    num_experts,
    offload_arguments,
    prepare_environment,
    say,
    write_model,
)

CLOSE = 0.05
"""Of two tokens' log probabilities, which TF32 cannot tell apart."""

PREFILLS = 5
"""Prompts of a turn."""

WORK_STEPS = 50
"""In which what a step does is counted."""

KV_BYTES = 1 << 30
"""Of engines that start at once; more than any of the requests needs."""

Work = Callable[[ChildEngine], float]
"""What an engine does in its turn; gives the milliseconds it took."""

TINY_MOE = Path(__file__).resolve().parent.parent / "examples" / "tiny-moe"


@dataclass(frozen=True)
class Engine:
    """slots: experts of each layer on the GPU, with the plugin. tp: GPUs."""

    mode: str
    slots: int | None = None
    tp: int = 1

    @classmethod
    def parse(cls, text: str) -> "Engine":
        mode, *numbers = text.split(":")
        if mode not in ("stock", "uva", "plugin") or not (1 <= len(numbers) <= 2 if mode == "plugin" else not numbers):
            raise argparse.ArgumentTypeError(f"'{text}' is none of stock, uva, plugin:SLOTS and plugin:SLOTS:GPUS")
        return cls(mode, *map(int, numbers))

    def all_on_one_gpu(self, experts: int) -> bool:
        return self.tp == 1 and (self.mode == "stock" or (self.slots or 0) >= experts)

    def arguments(self, model: Path, util: float) -> dict[str, Any]:
        # Engines that start beside others cannot find out how much memory they use.
        arguments = made_up_arguments(model, self.tp, util) | {"kv_cache_memory_bytes": KV_BYTES}
        return arguments | offload_arguments(self.mode, self.slots or 0, expert_gib(model) / self.tp)


def run_speed(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """A line a figure."""
    model = folder / "model"
    shape = write_model(model, args.shape, args.layers)
    experts = num_experts(model)
    whole = [engine for engine in args.engines if engine.all_on_one_gpu(experts)]
    shares = split_cores(len(whole)) if args.turns else [None] * len(whole)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with ExitStack() as stack:
        children = []
        at_start = iter(shares)
        for engine in args.engines:
            cores = next(at_start) if engine in whole else None
            child = ChildEngine(engine.mode, engine.arguments(model, args.util), cores)
            children.append(stack.enter_context(closing(child)))
        for child in children:
            child.wait_until_ready()
        for engine, child in zip(args.engines, children, strict=True):
            about = {"bench": "vllm", **asdict(engine), "shape": shape, "repeats": args.repeats}
            yield from (about | line for line in time_engine(child, args))
        if args.turns:
            taking = [child for engine, child in zip(args.engines, children, strict=True) if engine in whole]
            for prompt in args.prompt:
                about = {"bench": "vllm-turns", "part": "prefill", "shape": shape, "tokens": prompt}
                yield from (about | line for line in take_turns(taking, shares, args.turns, prefill_ms(prompt)))
            for batch in args.batch:
                about = {"bench": "vllm-turns", "part": "decode", "shape": shape, "batch": batch, "steps": args.steps}
                work = decode_ms(batch, args.steps)
                yield from (about | line for line in take_turns(taking, shares, args.turns, work))
                about = {"bench": "vllm-work", "part": "decode", "shape": shape, "batch": batch, "steps": WORK_STEPS}
                yield from (about | {"mode": child.name} | child.work(batch, WORK_STEPS) for child in taking)


def time_engine(child: ChildEngine, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    def best(batch: int, prompt: int, tokens: int) -> float:
        return min(child.seconds(batch, prompt, tokens) for _ in range(args.repeats))

    for batch in args.batch:
        child.seconds(batch, PROMPT, 1 + args.tokens)
        seconds = best(batch, PROMPT, 1 + args.tokens) - best(batch, PROMPT, 1)
        yield {"part": "decode", "batch": batch, "value": round(batch * args.tokens / seconds, 1), "unit": "tok/s"}
    for prompt in args.prompt:
        child.seconds(1, prompt, 1)
        yield {"part": "prefill", "tokens": prompt, "value": round(prompt / best(1, prompt, 1), 1), "unit": "tok/s"}


def split_cores(parts: int) -> list[list[int]]:
    """The usable cores in parts of one size; the same ones for all where there are fewer than parts."""
    cores = sorted(os.sched_getaffinity(0))
    size = len(cores) // max(parts, 1)
    return [cores[size * part : size * (part + 1)] if size else cores for part in range(parts)]


def decode_ms(batch: int, steps: int) -> Work:
    """Milliseconds a step of ``batch`` sequences."""

    def work(child: ChildEngine) -> float:
        return (child.seconds(batch, PROMPT, 1 + steps) - child.seconds(batch, PROMPT, 1)) / steps * 1e3

    return work


def prefill_ms(prompt: int) -> Work:
    """Milliseconds to the first token behind ``prompt`` tokens, the median of some."""

    def work(child: ChildEngine) -> float:
        return statistics.median(child.seconds(1, prompt, 1) for _ in range(PREFILLS)) * 1e3

    return work


def take_turns(
    children: list[ChildEngine], shares: list[list[int]], turns: int, work: Work
) -> Iterator[dict[str, Any]]:
    """Milliseconds of each engine, and how they compare with the first one's. A host's cores are not equally fast."""
    for child in children:
        work(child)
    times: list[list[float]] = [[] for _ in children]
    for turn in range(turns):
        for number, (child, its_times) in enumerate(zip(children, times, strict=True)):
            child.move_to(shares[(number + turn) % len(shares)])
            its_times.append(work(child))
        say(f"turn {turn}: " + ", ".join(f"{its_times[-1]:.3f} ms" for its_times in times))
    median, least = statistics.median(times[0]), min(times[0])
    for child, its_times in zip(children, times, strict=True):
        yield {
            "mode": child.name,
            "turns": turns,
            "value": round(statistics.median(its_times), 4),
            "least": round(min(its_times), 4),
            "unit": "ms",
            "of_first": round(statistics.median(its_times) / median, 4),
            "least_of_first": round(min(its_times) / least, 4),
        }


def run_tokens(args: argparse.Namespace, _folder: Path) -> Iterator[dict[str, Any]]:
    """A line an engine with the plugin: what it has in common with stock, and with the first such engine."""
    more: dict[str, Any] = {"dtype": "float32", "max_model_len": 256}
    if args.together:
        # Engines that start beside others cannot find out how much memory they use.
        more |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": KV_BYTES}
    # With several GPUs also one engine with the plugin on one of them.
    settings = [(1, args.slots[0])] * (args.tp > 1) + [(args.tp, slots) for slots in args.slots]
    engines = {"stock": common_arguments(args.model, 1, args.util) | more}
    for tp, slots in settings:
        arguments = common_arguments(args.model, tp, args.util) | more | offload_arguments("plugin", slots, 0)
        engines[f"{slots} slots, {tp} GPUs"] = arguments
    stock, *plugged = answers_together(engines) if args.together else answers_in_turn(engines)
    for (tp, slots), answers in zip(settings, plugged, strict=True):
        about = {"bench": "vllm-tokens", "model": args.model.name, "slots": slots, "tp": tp}
        same = sum(a.tokens == b.tokens for a, b in zip(plugged[0], answers, strict=True))
        yield about | compare_answers(stock, answers) | {"equal_to_first": same}


def answers_in_turn(engines: dict[str, dict[str, Any]]) -> list[list[Answer]]:
    found = []
    for name, arguments in engines.items():
        with closing(ChildEngine(name, arguments)) as child:
            child.wait_until_ready()
            found.append(child.answers())
    return found


def answers_together(engines: dict[str, dict[str, Any]]) -> list[list[Answer]]:
    """All engines start at once."""
    with ExitStack() as stack:
        children = [stack.enter_context(closing(ChildEngine(*engine))) for engine in engines.items()]
        for child in children:
            child.wait_until_ready()
        return [child.answers() for child in children]


def compare_answers(expected: list[Answer], found: list[Answer]) -> dict[str, Any]:
    """How many are equal; where others part, how much likelier its own token is by the expected one's engine."""
    partings = []
    for index, (a, b) in enumerate(zip(expected, found, strict=True)):
        if a.tokens != b.tokens:
            position = next(i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y)
            margin = a.margin(position, b.tokens[position])
            partings.append({"text": index, "position": position, "margin": margin})
    close = all(parting["margin"] is not None and parting["margin"] <= CLOSE for parting in partings)
    return {"texts": len(expected), "equal": len(expected) - len(partings), "partings": partings, "close": close}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--commit", help="of greenroom; by default what git says")
    common.add_argument("--fast-dummy", action="store_true", help="make weights up from one random block (seconds)")
    made_up = argparse.ArgumentParser(add_help=False)
    made_up.add_argument("--shape", default="q30-12L", help="a name from greenroom.bench.shapes")
    made_up.add_argument("--layers", type=int, help="another number of layers")
    made_up.add_argument("--batch", type=int, nargs="+", default=[1, 16])

    speed = parts.add_parser("speed", parents=[common, made_up])
    speed.add_argument("engines", type=Engine.parse, nargs="+", metavar="ENGINE", help="as above")
    speed.add_argument("--prompt", type=int, nargs="*", default=[512, 3900])
    speed.add_argument("--repeats", type=int, default=3)
    speed.add_argument("--tokens", type=int, default=32)
    speed.add_argument("--turns", type=int, default=0)
    speed.add_argument("--steps", type=int, default=200, help="of a turn")
    speed.set_defaults(run=run_speed)

    tokens = parts.add_parser("tokens", parents=[common])
    tokens.add_argument("--model", type=Path, default=TINY_MOE)
    tokens.add_argument("--tp", type=int, default=1, help="GPUs of the engines with the plugin")
    tokens.add_argument("--slots", type=int, nargs="+", default=[8, 0])
    tokens.add_argument("--together", action="store_true", help="start all engines at once; needs the GPU to itself")
    tokens.set_defaults(run=run_tokens)

    for part, util in ((speed, 0.1), (tokens, 0.9)):
        part.add_argument(
            "--util",
            type=float,
            default=util,
            help="gpu_memory_utilization of an engine; for speed only what must be free at its start",
        )
    return parser.parse_args()


def main() -> int:
    args, results = parse(), claim_stdout()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        prepare_environment(Path(name), args.fast_dummy)
        for line in args.run(args, Path(name)):
            failed |= not line.get("close", True)
            results.write(json.dumps(line | measured_with(args.commit)) + "\n")
            say(json.dumps(line))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
