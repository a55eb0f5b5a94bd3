"""Tiny random models of several families, by stock transformers. As a program: models.py FAMILY FOLDER."""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 256

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 32, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96},
    "qwen2_moe": {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 64,
        "intermediate_size": 64,
        "hidden_size": 128,
    },
    "mixtral": {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96},
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 96,
        "intermediate_size": 96,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.5,
    },
    "gpt_oss": {
        "head_dim": 32,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 96,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def save_tiny(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a checkpoint of ``family`` with random weights, biases included."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **(_COMMON | FAMILIES[family]))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    save_tiny(sys.argv[1], Path(sys.argv[2]), torch.bfloat16)
