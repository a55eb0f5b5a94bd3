"""Named model shapes for benchmarks: architectures of real models, some cut in depth."""

from collections.abc import Callable

from transformers import PretrainedConfig, Qwen3MoeConfig

from greenroom.errors import ConfigError


def _qwen3_30b(layers: int) -> Qwen3MoeConfig:
    """Qwen3-30B-A3B's architecture with ``layers`` of its 48 layers."""
    return Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        moe_intermediate_size=768,
        intermediate_size=6144,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def _small() -> Qwen3MoeConfig:
    """Seconds on any machine: to try a benchmark, not to quote it."""
    return Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        max_position_embeddings=8192,
        dtype="bfloat16",
    )


SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "q30-12L": lambda: _qwen3_30b(12),
    "q30-48L": lambda: _qwen3_30b(48),
    "small": _small,
}


def shape_config(name: str) -> PretrainedConfig:
    """
    Raises:
        ConfigError: no such shape.
    """
    if name not in SHAPES:
        raise ConfigError(f"unknown shape '{name}'; choose one of {', '.join(SHAPES)}")
    return SHAPES[name]()
