"""Attention of a single token over a plain KV cache."""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from greenroom.engine.single.passes import SinglePass
from greenroom.experts.attention import can_attend
from greenroom.experts.cpu import CpuExperts

ATTENTION = "greenroom-cpu"
"""Name of the attention function in transformers' registry."""

_HELPER = "_greenroom_single"
"""What attention modules know the engine by: the registry's functions belong to no model."""


class _Helper:
    def __init__(self, engine: CpuExperts, single: SinglePass) -> None:
        self.engine, self.single = engine, single


def take_attention(model: PreTrainedModel, engine: CpuExperts, single: SinglePass) -> None:
    """Lets ``model`` attend through ``attention_forward``, if it used sdpa."""
    if model.config._attn_implementation != "sdpa":
        return
    helper = _Helper(engine, single)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, _HELPER, helper)
    AttentionInterface.register(ATTENTION, attention_forward)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' interface: a single token without a mask by the engine, everything else by sdpa.

    Args:
        query: [B, Hq, T, D]; key, value: [B, Hk, S, D].

    Returns:
        [B, T, Hq, D], None.
    """
    helper = getattr(module, _HELPER, None)
    special = dropout or any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "s_aux"))
    if helper is None or not helper.single.active or special or attention_mask is not None:
        return _by_sdpa(module, query, key, value, attention_mask, dropout, scaling, kwargs)
    if not query.shape[0] == query.shape[2] == 1 or not can_attend(query[0], key[0], value[0]):
        return _by_sdpa(module, query, key, value, attention_mask, dropout, scaling, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = helper.engine.attend(query[0, :, 0].contiguous(), key[0], value[0], scale)
    return out.view(1, 1, *out.shape), None


def _by_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    result: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return result
