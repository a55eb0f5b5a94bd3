"""Attention of a single token over a plain KV cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from greenroom.engine.attention_name import asks_for_more, attention_named, configs_of
from greenroom.experts.attention import can_attend
from greenroom.experts.cpu import CpuExperts

ATTENTION = "greenroom-cpu"
"""Name of the attention function in transformers' registry."""

_ENGINE = "_greenroom_engine"
"""What attention modules know the engine by: the registry's functions belong to no model."""


class SingleAttention:
    """Lets a model attend through ``attention_forward`` in passes that ask for it."""

    def __init__(self, model: PreTrainedModel, engine: CpuExperts) -> None:
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, _ENGINE, engine)
        self._configs = configs_of(model)
        AttentionInterface.register(ATTENTION, attention_forward)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, unless the model attends by something else than sdpa. Its configuration is as before behind it."""
        with attention_named([c for c in self._configs if c._attn_implementation == "sdpa"], ATTENTION):
            yield


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
    engine = getattr(module, _ENGINE, None)
    special = asks_for_more(dropout, kwargs)
    usual = attention_mask is None and not special and query.shape[0] == query.shape[2] == 1
    if engine is None or not usual or not can_attend(query[0], key[0], value[0]):
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = engine.attend(query[0, :, 0].contiguous(), key[0], value[0], scale)
    return out.view(1, 1, *out.shape), None
