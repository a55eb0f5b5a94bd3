"""Tiny random models of every MoE family that greenroom serves, in their stock transformers classes.

Small enough that a forward takes milliseconds, odd enough (more experts than a token chooses, a dense
first layer where the family has one, widths that are not powers of two) that a wrong layout shows.
"""

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MiniMaxM2Config,
    MixtralConfig,
    NemotronHConfig,
    OlmoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

VOCAB = 128
HIDDEN = 48
INTER = 24
MAX_POSITIONS = 256

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "pad_token_id": 0,
    # No end token: every generation has the length that a test asks for.
    "eos_token_id": None,
}
_MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}


def _qwen2_moe() -> PretrainedConfig:
    return Qwen2MoeConfig(
        **_COMMON,
        num_hidden_layers=3,
        intermediate_size=40,
        moe_intermediate_size=INTER,
        shared_expert_intermediate_size=32,
        num_experts=12,
        num_experts_per_tok=4,
        mlp_only_layers=[1],
    )


def _qwen3_moe() -> PretrainedConfig:
    return Qwen3MoeConfig(
        **_COMMON,
        num_hidden_layers=2,
        head_dim=16,
        intermediate_size=40,
        moe_intermediate_size=INTER,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )


def _qwen3_next() -> PretrainedConfig:
    return Qwen3NextConfig(
        **_COMMON,
        num_hidden_layers=4,
        head_dim=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        intermediate_size=40,
        moe_intermediate_size=INTER,
        shared_expert_intermediate_size=32,
        num_experts=16,
        num_experts_per_tok=3,
    )


def _mixtral() -> PretrainedConfig:
    return MixtralConfig(
        **_COMMON, num_hidden_layers=2, intermediate_size=32, num_local_experts=8, num_experts_per_tok=2
    )


def _olmoe() -> PretrainedConfig:
    return OlmoeConfig(**_COMMON, num_hidden_layers=2, intermediate_size=INTER, num_experts=16, num_experts_per_tok=4)


def _deepseek_v2() -> PretrainedConfig:
    return DeepseekV2Config(
        **_COMMON | _MLA,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        intermediate_size=40,
        moe_intermediate_size=INTER,
        n_routed_experts=12,
        n_shared_experts=2,
        num_experts_per_tok=3,
        routed_scaling_factor=1.5,
    )


def _deepseek_v3() -> PretrainedConfig:
    return DeepseekV3Config(
        **_COMMON | _MLA,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        intermediate_size=40,
        moe_intermediate_size=INTER,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
    )


def _glm4_moe() -> PretrainedConfig:
    return Glm4MoeConfig(
        **_COMMON,
        num_hidden_layers=3,
        head_dim=16,
        first_k_dense_replace=1,
        intermediate_size=40,
        moe_intermediate_size=INTER,
        n_routed_experts=12,
        n_shared_experts=1,
        num_experts_per_tok=3,
        use_qk_norm=True,
    )


def _gpt_oss() -> PretrainedConfig:
    return GptOssConfig(
        **_COMMON,
        num_hidden_layers=2,
        head_dim=16,
        intermediate_size=INTER,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def _granitemoe() -> PretrainedConfig:
    return GraniteMoeConfig(
        **_COMMON,
        num_hidden_layers=2,
        intermediate_size=INTER,
        num_local_experts=10,
        num_experts_per_tok=3,
        attention_multiplier=0.25,
        residual_multiplier=0.7,
    )


def _ernie4_5_moe() -> PretrainedConfig:
    return Ernie4_5_MoeConfig(
        **_COMMON,
        num_hidden_layers=3,
        intermediate_size=40,
        moe_intermediate_size=INTER,
        moe_num_experts=12,
        moe_k=3,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    )


def _minimax_m2() -> PretrainedConfig:
    return MiniMaxM2Config(
        **_COMMON,
        num_hidden_layers=2,
        head_dim=16,
        intermediate_size=INTER,
        num_local_experts=16,
        num_experts_per_tok=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )


def _nemotron_h() -> PretrainedConfig:
    return NemotronHConfig(
        **_COMMON,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
        head_dim=16,
        intermediate_size=40,
        moe_intermediate_size=INTER,
        moe_shared_expert_intermediate_size=32,
        n_routed_experts=12,
        num_experts_per_tok=3,
        ssm_state_size=8,
        mamba_num_heads=8,
        mamba_head_dim=12,
        n_groups=2,
        chunk_size=16,
    )


def _gemma4() -> PretrainedConfig:
    return Gemma4TextConfig(
        **_COMMON,
        num_hidden_layers=3,
        head_dim=16,
        global_head_dim=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=16,
        intermediate_size=40,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=12,
        top_k_experts=3,
        moe_intermediate_size=INTER,
    )


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granitemoe,
    "ernie4_5_moe": _ernie4_5_moe,
    "minimax_m2": _minimax_m2,
    "nemotron_h": _nemotron_h,
    "gemma4": _gemma4,
}

_KEPT = ("A_log", "dt_bias", "layer_scalar")
"""Parameters whose initial values mean something (time constants of state-space layers)."""


def make_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: int) -> PreTrainedModel:
    """A stock model of ``family`` in eval mode, the same for the same arguments.

    changes: of its configuration.

    Its weights are drawn wide enough for routing and logits to depend clearly on the input and on every
    expert; biases, norms and routing corrections are jittered, so that none of them can be lost unseen.
    """
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
            _randomise(name, tensor, generator)
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = None
    return model


def _randomise(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    leaf = name.rpartition(".")[2]
    if leaf in _KEPT:
        return

    def noise(std: float) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator) * std

    if leaf == "e_score_correction_bias":  # a buffer in most families, a parameter in ernie4_5_moe
        tensor.copy_(noise(0.05))
    elif not isinstance(tensor, torch.nn.Parameter):  # rotary frequencies and the like
        return
    elif "embed" in name:
        tensor.copy_(noise(0.5))
    elif ".experts." in name or name.startswith("lm_head"):
        tensor.copy_(noise(0.3))
    elif tensor.ndim >= 2:
        tensor.copy_(noise(0.18))
    elif leaf in ("bias", "sinks"):
        tensor.copy_(noise(0.1))
    else:
        tensor.add_(noise(0.1).to(tensor.dtype))
