"""Fewer, larger kernels for the parts of a model that are not experts, through transformers' own interfaces.

Decode at a few sequences is a chain of small kernels. RMS norms become one kernel each, and attention over a
KV cache of fixed size reads keys and values once for all query heads that share them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from greenroom.engine.attention_name import asks_for_more
from greenroom.engine.known_parts import rms_epsilon
from greenroom.kernels.gpu.decode_attention import decode_attention
from greenroom.kernels.gpu.rms_norm import rms_norm

ATTENTION = "greenroom"
"""Name of the attention function in transformers' registry."""


def fuse_norms(model: nn.Module) -> int:
    """Gives every module that computes an RMS norm the kernel; returns how many."""
    fused = 0
    for module in model.modules():
        epsilon = rms_epsilon(module)
        if epsilon is not None:
            module.forward = _fused(module, epsilon)
            fused += 1
    return fused


def use_decode_attention(model: PreTrainedModel) -> bool:
    """Lets ``model`` attend through ``attention_forward``, if it used sdpa; returns whether it does now."""
    if model.config._attn_implementation == ATTENTION:
        return True
    if model.config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(ATTENTION, attention_forward)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)
    return True


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """transformers' interface: one new token over a masked cache here, everything else by sdpa.

    Args:
        query: [B, Hq, T, D]; key, value: [B, Hk, S, D].
        attention_mask: bool [B or 1, 1, T, S], or None.

    Returns:
        [B, T, Hq, D], None.
    """
    if asks_for_more(dropout, kwargs) or not _is_decode(query, key, value, attention_mask):
        with _without_cudnn() if query.shape[2] == 1 else nullcontext():
            result: tuple[torch.Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        return result
    assert attention_mask is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return decode_attention(query, key, value, attention_mask, scale), None


def _without_cudnn() -> AbstractContextManager[None]:
    """cuDNN plans anew for every length of a cache that grows, which takes it longer than a decode step may."""
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    context: AbstractContextManager[None] = sdpa_kernel(others)
    return context


def _is_decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    return (
        query.shape[2] == 1
        and mask is not None
        and mask.dtype == torch.bool
        and mask.shape[1:] == (1, 1, key.shape[2])
        and mask.stride(-1) == 1
        and query.stride(-1) == 1
        and key.stride()[2:] == (key.shape[3], 1)
        and value.stride()[2:] == (value.shape[3], 1)
        and query.shape[1] % key.shape[1] == 0
    )


def _fused(module: nn.Module, epsilon: float) -> Callable[[torch.Tensor], torch.Tensor]:
    own = module.forward

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        assert isinstance(module.weight, torch.Tensor)
        if hidden_states.dtype != module.weight.dtype:
            # Weights kept wider than the model: families differ in what they round, and when.
            result: torch.Tensor = own(hidden_states)
            return result
        return rms_norm(hidden_states.contiguous(), module.weight, epsilon)

    return forward
