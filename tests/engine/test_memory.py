"""Peak host memory of loading a model of more than half a gigabyte, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.reference.tokenizer import VOCAB, make_tokenizer

HIDDEN, INTER, EXPERTS, LAYERS = 512, 512, 64, 6

_PROBE = """
import json, sys
import greenroom, greenroom.engine.loader, torch

def status(key):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) * 1024

# Libraries that load only with the first model, and their threads, are not the model's memory.
warm, _ = greenroom.load(sys.argv[2], progress=False, device="cpu")
greenroom.close(warm)
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # restarts the peak
model, _ = greenroom.load(sys.argv[1], progress=False, device="cpu")
print(json.dumps({"peak": status("VmHWM") - before, "after": status("VmRSS") - before}))
"""


def config(layers: int, experts: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        moe_intermediate_size=INTER,
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        dtype="bfloat16",
    )


@pytest.fixture(scope="module")
def big_model(tmp_path_factory) -> tuple[Path, int]:
    """A checkpoint in hub layout, one shard a layer, and its bytes of weights."""
    folder = tmp_path_factory.mktemp("big")
    with torch.device("meta"):
        names = Qwen3MoeForCausalLM(config(LAYERS, EXPERTS)).state_dict()
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in names.items():
        shard = shards.setdefault("-".join(name.split(".")[1:3]) + ".safetensors", {})
        values = torch.empty(tensor.shape, dtype=torch.bfloat16).normal_(std=0.02)
        if name.endswith("gate_up_proj"):
            for expert, pair in enumerate(values):
                gate, up = pair.chunk(2)
                base = name.replace("gate_up_proj", str(expert))
                shard[f"{base}.gate_proj.weight"], shard[f"{base}.up_proj.weight"] = gate.clone(), up.clone()
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(values):
                shard[name.replace("down_proj", f"{expert}.down_proj.weight")] = down.clone()
        else:
            shard[name] = values
    index = {name: file for file, tensors in shards.items() for name in tensors}
    total = sum(t.nbytes for tensors in shards.values() for t in tensors.values())
    for file, tensors in shards.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    config(LAYERS, EXPERTS).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder, total


def test_peak_host_memory_is_the_model(big_model, tmp_path):
    folder, total = big_model
    assert total > 500_000_000
    small = Qwen3MoeForCausalLM(config(1, 4)).to(torch.bfloat16)
    small.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    out = subprocess.run(
        [sys.executable, "-c", _PROBE, str(folder), str(tmp_path)], capture_output=True, text=True, check=True
    )
    measured = json.loads(out.stdout.splitlines()[-1])
    assert measured["peak"] <= 1.05 * total, f"peak {measured['peak'] / total:.3f} of the model"
    assert measured["after"] >= 0.9 * total, "the model is not in memory, so the peak says nothing"
