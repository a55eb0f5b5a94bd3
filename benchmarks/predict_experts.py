"""Can the next layer's experts be told from the hidden state of now, and would copying them ahead pay?

    python benchmarks/predict_experts.py [MODEL] [--tokens N]

While the model decodes six prompts, each layer's router is also asked early: with the hidden state in front of the
experts of the layer before ("before"), when a copy could hide behind those experts, and with the one behind them
("behind"), when only the attention in between is left to hide it. Its own norm is applied to both.

Prints one JSON line a moment and number of predictions m: ``recall``, the share of the layer's experts that are among
the m likeliest. With an LFRU cache of a quarter of the experts, and of the m likeliest only those without a slot:
``missing``, experts a layer a step that have no slot; ``found``, the share of those that is predicted; ``used``, the
share of what would be copied that is needed. "uniform" is what guessing would give.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from replay_policies import PROMPTS
from torch import nn

import greenroom
from greenroom.engine.generation import generate
from greenroom.experts.admission import Admission
from greenroom.experts.cache import ExpertCache
from greenroom.experts.policies import make_policy
from greenroom.experts.residency import ABSENT

MOMENTS = ("before", "behind")


class Recorder:
    """Router logits of each layer for each decoded token, as they are and as they would have been said early."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self.layers = layers
        self.steps: list[dict[str, np.ndarray]] = []
        self._row: dict[str, dict[int, np.ndarray]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = []
        for index, layer in enumerate(self.layers):
            norm, gate = layer.post_attention_layernorm, layer.mlp.gate
            handles.append(norm.register_forward_pre_hook(lambda _, args, i=index: self._early("before", i, args[0])))
            handles.append(gate.register_forward_hook(lambda _, __, out, i=index: self._note("now", i, out[0])))
            handles.append(layer.register_forward_hook(lambda _, __, out, i=index: self._early("behind", i, out)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _early(self, moment: str, layer: int, hidden: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        if layer + 1 == len(self.layers) or hidden.shape[-2] != 1:
            return
        following = self.layers[layer + 1]
        # Not through the modules: hooks would take this for the layer's own pass.
        normed = following.post_attention_layernorm.forward(hidden.reshape(1, -1))
        self._note(moment, layer + 1, following.mlp.gate.forward(normed)[0])

    def _note(self, moment: str, layer: int, logits: torch.Tensor) -> None:
        if len(logits) != 1:
            return
        row = self._row.setdefault(moment, {})
        row[layer] = logits[0].float().numpy()
        if moment == "now" and layer + 1 == len(self.layers):
            steps = {moment: np.stack([found[i] for i in sorted(found)]) for moment, found in self._row.items()}
            self.steps.append(steps)
            self._row = {}


def likeliest(logits: np.ndarray, count: int) -> np.ndarray:
    """bool [layers, experts]."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    mask = np.zeros(logits.shape, dtype=bool)
    np.put_along_axis(mask, order, True, axis=1)
    return mask


def judge(steps: list[dict[str, np.ndarray]], moment: str, count: int, top_k: int) -> dict[str, float]:
    """Layers from the second on."""
    layers, experts = steps[0]["now"].shape
    cache = ExpertCache([experts] * layers, [experts // 4] * layers)
    admission = Admission([experts] * layers, make_policy("lfru"), top_k, 2)
    needed = recalled = missing = found = copied = 0
    for step in steps:
        used = likeliest(step["now"], top_k)
        said = np.concatenate([np.zeros((1, experts), dtype=bool), likeliest(step[moment], count)])
        absent = cache.slot_of == ABSENT
        needed += used[1:].sum()
        recalled += (used & said)[1:].sum()
        missing += (used & absent)[1:].sum()
        found += (used & absent & said)[1:].sum()
        copied += (absent & said)[1:].sum()
        ids = np.argsort(-step["now"], axis=1, kind="stable")[:, None, :top_k].astype(np.int32)
        admission.record_all(ids, np.broadcast_to(-np.arange(top_k, dtype=float), ids.shape))
        for layer, swap in admission.end_step(cache):
            cache.map_landed(cache.unmap_and_write(layer, swap))
    return {
        "recall": recalled / needed,
        "missing": missing / len(steps) / (layers - 1),
        "found": found / missing,
        "used": found / copied,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="examples/tiny-moe")
    parser.add_argument("--tokens", type=int, default=128, help="decoded for each of six prompts")
    arguments = parser.parse_args()
    model, tokenizer = greenroom.load(arguments.model, cache_expert_num=0, progress=False)
    top_k = model.config.num_experts_per_tok
    recorder = Recorder(model.model.layers)
    with recorder.watching():
        for seed, prompt in enumerate(PROMPTS):
            generate(model, tokenizer, prompt, arguments.tokens, temperature=0.8, top_p=0.95, seed=seed)
    greenroom.close(model)
    steps, random = recorder.steps, np.random.default_rng(0)
    for step in steps:
        step["uniform"] = random.random(step["before"].shape)
    for moment in (*MOMENTS, "uniform"):
        for count in (top_k // 2, top_k, 2 * top_k):
            line = {"bench": "predict_experts", "moment": moment, "m": count, "top_k": top_k, "steps": len(steps)}
            found = judge(steps, moment, count, top_k)
            print(json.dumps(line | {name: round(float(value), 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()
