"""Attention over packed sequences whose keys and values are in blocks, as a function that transformers calls."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from greenroom.engine.paged.cache import PagedBatch, PagedLayer
from greenroom.engine.paged.packing import Span

PAGED = "greenroom_paged"
"""Name in transformers' registries."""


@contextmanager
def attends_to_blocks(model: PreTrainedModel) -> Iterator[None]:
    """Inside, ``model`` attends through ``paged_attention`` and makes no masks."""
    AttentionInterface.register(PAGED, paged_attention)
    AttentionMaskInterface.register(PAGED, _no_mask)
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    for config, _ in before:
        config._attn_implementation = PAGED
    try:
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    paged: PagedBatch,
    scaling: float | None = None,
    **_others: object,
) -> tuple[torch.Tensor, None]:
    """transformers' interface.

    Args:
        query: [1, Hq, T, D], the batch's tokens.
        key, value: [1, Hk, S, D or Dv]: what ``PagedCache.update`` returned.
        paged: describes the batch.

    Returns:
        [1, T, Hq, Dv], None.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    if paged.singles:
        singles = query[:, :, : paged.singles]
        if paged.single_keys is None:
            from greenroom.kernels.gpu.paged_attention import paged_decode_attention

            assert isinstance(module.layer_idx, int)
            layer = paged.cache.layers[module.layer_idx]
            assert isinstance(layer, PagedLayer)
            result = paged_decode_attention(
                singles, layer.keys, layer.values, paged.tables, paged.lengths, paged.cache.block_size, scale
            )
        else:
            result = attend_singles(singles, key, value, paged.single_keys, paged.lengths, scale)
        out[:, : paged.singles] = result
    for span in paged.spans:
        queries = slice(span.query_start, span.query_start + span.query_num)
        out[:, queries] = attend_span(query[:, :, queries], key, value, span, scale).transpose(1, 2)
    return out, None


def attend_singles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    places: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One token of each sequence over the sequence's keys, all sequences in one call.

    Args:
        query: [1, Hq, n, D]; key, value: [1, Hk, S, D or Dv].
        places: int64 [n, longest], where the keys of each are. lengths: int64 [n], how many of them are its own.

    Returns:
        [1, n, Hq, Dv].
    """
    heads, key_heads, rows = query.shape[1], key.shape[1], query.shape[2]
    # Query heads that share a key head are rows of one query.
    asked = query[0].transpose(0, 1).reshape(rows, key_heads, heads // key_heads, -1)
    keys, values = (tensor[0][:, places].transpose(0, 1) for tensor in (key, value))
    seen = torch.arange(places.shape[1], device=lengths.device) < lengths[:, None]
    result = scaled_dot_product_attention(asked, keys, values, attn_mask=seen[:, None, None], scale=scale)
    return result.reshape(1, rows, heads, -1)


def attend_span(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: Span, scale: float) -> torch.Tensor:
    """The new tokens of one sequence over all of it, each up to itself.

    Args:
        query: [1, Hq, T, D]; key, value: [1, Hk, S, D or Dv].

    Returns:
        [1, Hq, T, Dv].
    """
    keys = slice(span.key_start, span.key_start + span.key_num)
    key, value = key[:, :, keys], value[:, :, keys]
    grouped = query.shape[1] != key.shape[1]
    result: torch.Tensor
    if span.query_num == span.key_num:
        result = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        bias = causal_lower_right(span.query_num, span.key_num)
        result = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=grouped)
    return result


def _no_mask(*_: object, **_others: object) -> None:
    """The batch says who sees whom."""
