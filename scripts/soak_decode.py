#!/usr/bin/env python3
"""Thousands of decode steps with random cache sizes, policies and delays, held against stock transformers.

Each round loads a small model with other knobs and decodes given tokens, so that the logits of every step can be
compared with one forward pass of the stock model over the whole sequence. CPU threads are slowed by random factors;
streams that copy are held up at random. At the end nothing may be left of a round: device memory, threads, mailboxes.

Usage: PYTHONPATH=src python scripts/soak_decode.py [--steps 10000] [--rounds 20] [--seed 0]
"""

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import greenroom
from greenroom.engine.offload import offload_of
from greenroom.engine.step_runner import StepRunner
from tests.reference.tokenizer import make_tokenizer

EXPERTS, TOP_K, LAYERS, VOCABULARY = 16, 4, 4, 128
PROMPT, LENGTH = 8, 108
"""Tokens of a prompt, and of a whole sequence."""

TOLERANCE = 2e-3
"""Of logits in float32, whose standard deviation is about one."""


def make_stock(folder: Path) -> PreTrainedModel:
    """A random model in float32, saved to ``folder``."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        max_position_embeddings=256, norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.08) if parameter.ndim > 1 else parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return model.to("cuda")


class Delays:
    """Holds up streams and threads of one model at random."""

    def __init__(self, model: PreTrainedModel, chance: random.Random) -> None:
        offload = offload_of(model)
        self._engine, self._tier, self._chance = offload.engine, offload.manager.tier, chance

    def before_step(self) -> None:
        """Some steps are left alone; a clock cycle is about half a nanosecond."""
        if self._chance.random() < 0.1:
            self._engine.throttle(self._chance.choice([1.0, 1.0, 2.0, 8.0, 50.0]))
        if self._chance.random() < 0.2:
            with torch.cuda.stream(self._tier._write_stream):
                torch.cuda._sleep(self._chance.randrange(4_000_000))
        if self._chance.random() < 0.1:
            torch.cuda._sleep(self._chance.randrange(400_000))


def run_round(folder: Path, stock: PreTrainedModel, chance: random.Random, steps: int) -> dict[str, object]:
    """Decodes about ``steps`` steps; returns what was done and the largest difference of any logit."""
    knobs = {
        "cache_expert_num": chance.randrange(EXPERTS + 1),
        "policy": chance.choice(["lru", "lfu", "lfru"]),
        "update_expert_num": chance.choice([1, 2, 8]),
        "context_num_threads": chance.choice([1, 3, 8, None]),
    }
    rows, done, worst = chance.randrange(1, 9), 0, torch.zeros((), device="cuda")
    model, _ = greenroom.load(folder, progress=False, device="cuda", **knobs)
    try:
        runner = StepRunner(model, rows, LENGTH)
        delays = Delays(model, chance)
        while done < steps:
            ids = torch.randint(4, VOCABULARY, (rows, LENGTH), device="cuda")
            with torch.no_grad():
                expected = stock(input_ids=ids).logits
            runner.prefill(ids[:, :PROMPT])
            # Half of the sequences do not wait for the end of a step before the next one.
            step = chance.choice([runner.step, runner.start])
            for position in range(PROMPT, LENGTH):
                delays.before_step()
                logits = step(ids[:, position : position + 1])
                worst = torch.maximum(worst, (logits - expected[:, position]).abs().max())
                offload_of(model).manager.check_invariants()
            runner.wait()
            done += LENGTH - PROMPT
        total = greenroom.stats(model).total.to_dict()
        runner.close()
    finally:
        greenroom.close(model)
    return {**knobs, "rows": rows, "steps": done, "worst": float(worst), **total}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance, process, started, steps = random.Random(arguments.seed), psutil.Process(), time.monotonic(), 0
    failed, first = False, None
    with tempfile.TemporaryDirectory() as name:
        stock = make_stock(Path(name))
        for _ in range(arguments.rounds):
            result = run_round(Path(name), stock, chance, arguments.steps // arguments.rounds)
            gc.collect()
            left = (torch.cuda.memory_allocated(), process.num_threads(), process.memory_info().rss)
            first = first or left
            steps += int(str(result["steps"]))
            wrong = not float(str(result["worst"])) <= TOLERANCE
            leaked = left[0] > first[0] + (1 << 20) or left[1] > first[1] + 2 or left[2] > first[2] + (512 << 20)
            failed |= wrong or leaked
            print(json.dumps({**result, "wrong": wrong, "leaked": leaked, "left": left}), flush=True)
    print(f"{'FAILED' if failed else 'passed'}: {steps} steps in {time.monotonic() - started:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
