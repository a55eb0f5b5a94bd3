#!/usr/bin/env python3
"""llama.cpp and greenroom on a machine without a GPU, by turns: decode of one sequence, and a prompt. JSON lines.

Both run a Qwen3-MoE model of random BF16 weights; llama.cpp's is written to a temporary folder first. Needs the package
gguf, and llama-bench as llama.cpp builds it (cmake -DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release).

Usage: PYTHONPATH=src python scripts/compare_llama_cpp.py LLAMA_BENCH [--shape q30-12L] [--prompt 512] [--turns 3]
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from greenroom.bench.commit import commit_hash
from greenroom.bench.result import cpu_name
from greenroom.bench.shapes import shape_config

NOISE = 1 << 24
"""Numbers of random weights; a tensor takes them again and again, from another place each."""

SPREAD = 0.02
"""Standard deviation of weights."""


class RandomWeights:
    """BF16 as raw bytes."""

    def __init__(self) -> None:
        normal = np.random.default_rng(0).standard_normal(NOISE, dtype=np.float32) * SPREAD
        self._bits = (normal.view(np.uint32) >> 16).astype(np.uint16)
        self._next = 0

    def draw(self, *shape: int) -> np.ndarray:
        """uint16 of ``shape``."""
        self._next = (self._next + 7919) % NOISE
        return np.resize(np.roll(self._bits, -self._next), shape)


def write_gguf(path: Path, config: Any) -> None:
    """A model of ``config``'s shape, a Qwen3MoeConfig, without a vocabulary's texts."""
    writer = gguf.GGUFWriter(path, "qwen3moe", use_temp_file=False)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    shapes = tensors(config)
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * shape[0])
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor_info(name, shape, np.dtype(np.uint16), 2 * math.prod(shape), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    weights = RandomWeights()
    for shape in shapes.values():
        writer.write_tensor_data(np.ones(shape, dtype=np.float32) if len(shape) == 1 else weights.draw(*shape))
    writer.close()


def tensors(config: Any) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor by name, as torch would have it."""
    hidden, head, inter = config.hidden_size, config.head_dim, config.moe_intermediate_size
    queries, keys, experts = config.num_attention_heads * head, config.num_key_value_heads * head, config.num_experts
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (config.vocab_size, hidden),
    }
    for layer in range(config.num_hidden_layers):
        parts = {
            "attn_norm": (hidden,),
            "attn_q": (queries, hidden),
            "attn_k": (keys, hidden),
            "attn_v": (keys, hidden),
            "attn_output": (hidden, queries),
            "attn_q_norm": (head,),
            "attn_k_norm": (head,),
            "ffn_norm": (hidden,),
            "ffn_gate_inp": (experts, hidden),
            "ffn_gate_exps": (experts, inter, hidden),
            "ffn_up_exps": (experts, inter, hidden),
            "ffn_down_exps": (experts, hidden, inter),
        }
        found |= {f"blk.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return found


def run_llama(bench: Path, model: Path, args: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of decode and of the prompt."""
    sizes = ["-p", str(args.prompt), "-n", str(args.tokens), "-r", str(args.repeats)]
    done = subprocess.run(
        [bench, "-m", model, "-t", str(args.threads), *sizes, "-o", "json"], check=True, stdout=subprocess.PIPE
    )
    return {"prefill" if test["n_prompt"] else "decode": float(test["avg_ts"]) for test in json.loads(done.stdout)}


def run_greenroom(args: argparse.Namespace) -> dict[str, float]:
    """The same of ``greenroom bench``, nothing cached: without a GPU a slot would be memory as any other."""
    found = {}
    common = ["--shape", args.shape, "--cache-expert-num", "0", "--context-num-threads", str(args.threads), "--json"]
    for name, sizes in (("decode", ["--steps", str(args.tokens)]), ("prefill", ["--tokens", str(args.prompt)])):
        command = [sys.executable, "-m", "greenroom", "bench", name, *sizes, *common]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        found[name] = float(json.loads(done.stdout)["value"])
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_bench", type=Path)
    parser.add_argument("--shape", default="q30-12L", help="a name from greenroom.bench.shapes, of a Qwen3-MoE model")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32, help="to decode")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3, help="of llama-bench, in each turn")
    parser.add_argument("--turns", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        write_gguf(model, shape_config(args.shape))
        turns = [(run_llama(args.llama_bench, model, args), run_greenroom(args)) for _ in range(args.turns)]
    for part in ("decode", "prefill"):
        llama, ours = (statistics.median(turn[side][part] for turn in turns) for side in (0, 1))
        print(
            json.dumps(
                {
                    "bench": "llama.cpp",
                    "part": part,
                    "shape": args.shape,
                    "threads": args.threads,
                    "tokens": args.prompt if part == "prefill" else args.tokens,
                    "llama_cpp": llama,
                    "greenroom": ours,
                    "times_as_fast": ours / llama,
                    "turns": [[turn[side][part] for turn in turns] for side in (0, 1)],
                    "unit": "tok/s",
                    "cpu": cpu_name(),
                    "commit": commit_hash(),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
