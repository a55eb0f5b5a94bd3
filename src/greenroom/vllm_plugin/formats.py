"""A vLLM layer's experts as an ``ExpertFormat``."""

from dataclasses import dataclass
from typing import Any

import torch

from greenroom.errors import UnsupportedModelError
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat

_KINDS = {
    "silu": ActivationKind.SILU,
    "gelu": ActivationKind.GELU,
    "gelu_tanh": ActivationKind.GELU_TANH,
    "relu2": ActivationKind.RELU2,
    "swigluoai": ActivationKind.SWIGLU_OAI,
    "swigluoai_uninterleave": ActivationKind.SWIGLU_OAI,
}
"""vLLM's names, without the suffix for experts that have no gate."""

_INTERLEAVED = "swigluoai"
"""Its checkpoints have the rows of gate and up in turn."""

_OAI_ALPHA, _OAI_LIMIT = 1.702, 7.0
"""What vLLM computes where a layer says nothing."""


@dataclass(frozen=True)
class LayerFormat:
    """``format`` of the blocks, and whether rows of gate and up alternate in what vLLM loads."""

    format: ExpertFormat
    interleaved: bool


def layer_format(
    moe: Any, params_dtype: torch.dtype, limit: float | None, alpha: float | None, beta: float | None
) -> LayerFormat:
    """The format of a layer of this rank.

    Args:
        moe: its ``FusedMoEConfig``; widths are those of the rank's shard.
        limit, alpha, beta: of its clamped SwiGLU, where the model gives them.

    Raises:
        UnsupportedModelError: an activation or dtype that the core does not have.
    """
    name = moe.activation.value
    kind = _KINDS.get(name.removesuffix("_no_mul"))
    if kind is None:
        raise UnsupportedModelError(f"--moe-offload does not support experts with activation '{name}'; run without it")
    if kind == ActivationKind.SWIGLU_OAI:
        if beta not in (None, 1.0):
            raise UnsupportedModelError(f"--moe-offload does not support a swiglu_beta of {beta}; run without it")
        activation = Activation(kind, alpha or _OAI_ALPHA, limit or _OAI_LIMIT)
    else:
        activation = Activation(kind, limit=limit or float("inf"))
    try:
        fmt = ExpertFormat(
            hidden=moe.hidden_dim,
            inter=moe.intermediate_size_per_partition,
            dtype=params_dtype,
            activation=activation,
            gated=moe.activation.is_gated,
            bias=moe.has_bias,
        )
    except ValueError as error:
        raise UnsupportedModelError(f"--moe-offload cannot run these experts: {error}") from error
    return LayerFormat(fmt, name == _INTERLEAVED)


def deinterleave_(rows: torch.Tensor) -> None:
    """Turns rows g0, u0, g1, u1, … into g0, g1, …, u0, u1, …, in place. ``rows``: [2 * inter, ...]."""
    rows.copy_(torch.cat([rows[0::2], rows[1::2]]))
