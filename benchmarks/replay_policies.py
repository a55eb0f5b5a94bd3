"""Which policy would have hit how often: routing recorded from a real model, replayed through the cache.

    python benchmarks/replay_policies.py [MODEL] [--tokens N]

Prints one JSON line a result: policy, slots, cache_topk, update_expert_num, hit_rate, copies a layer a step; "belady"
knows the future and bounds them all.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import greenroom
from greenroom.engine.generation import generate
from greenroom.engine.offload import offload_of
from greenroom.experts.admission import by_weight
from greenroom.experts.policies import make_policy
from greenroom.experts.replay import Step, belady_hits, replay

PROMPTS = (
    "In the beginning",
    "And it came to pass in those days, that",
    "The LORD is my shepherd;",
    "hacker: n.",
    "It is a truth universally acknowledged, that",
    "Blessed are they that",
)


def record_decode(model_name: str, tokens: int) -> list[Step]:
    """Routing of decode steps (one token each), choices in falling order of weight."""
    model, tokenizer = greenroom.load(model_name, cache_expert_num=0, progress=False)
    manager = offload_of(model).manager
    steps: list[Step] = []
    current: dict[int, np.ndarray] = {}
    record, end_step = manager.admission.record, manager.end_step

    def recording(layer, ids, weights, *rest):
        current[layer] = by_weight(ids, weights)
        record(layer, ids, weights, *rest)

    def ending():
        if all(len(ids) == 1 for ids in current.values()):
            steps.append([current[layer] for layer in sorted(current)])
        current.clear()
        end_step()

    manager.admission.record, manager.end_step = recording, ending
    for seed, prompt in enumerate(PROMPTS):
        generate(model, tokenizer, prompt, tokens, temperature=0.8, top_p=0.95, seed=seed)
    greenroom.close(model)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="examples/tiny-moe")
    parser.add_argument("--tokens", type=int, default=128, help="decoded for each of six prompts")
    arguments = parser.parse_args()
    steps = record_decode(arguments.model, arguments.tokens)
    layers, experts = len(steps[0]), json.loads((Path(arguments.model) / "config.json").read_text())["num_experts"]
    for slots in (experts // 8, experts // 4, experts // 2):
        for topk in (2, steps[0][0].shape[1]):
            for limit in (2, experts):
                for name in ("lru", "lfu", "lfru", "first-come"):
                    result = replay(steps, experts, layers, slots, make_policy(name), topk, limit)
                    report(name, slots, topk, limit, result, len(steps) * layers)
        report("belady", slots, steps[0][0].shape[1], experts, belady_hits(steps, slots), len(steps) * layers)


def report(policy: str, slots: int, topk: int, limit: int, result, layer_steps: int) -> None:
    print(
        json.dumps(
            {
                "bench": "replay_policies",
                "policy": policy,
                "slots": slots,
                "cache_topk": topk,
                "update_expert_num": limit,
                "hit_rate": round(result.hit_rate, 4),
                "copies": round(result.admissions / layer_steps, 3),
                "layer_steps": layer_steps,
            }
        )
    )


if __name__ == "__main__":
    main()
