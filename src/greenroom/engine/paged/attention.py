"""Attention over packed sequences whose keys and values are in blocks, as a function that transformers calls."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from greenroom.engine.attention_name import attention_named, configs_of
from greenroom.engine.paged.cache import PagedBatch, PagedLayer
from greenroom.engine.paged.packing import Span

PAGED = "greenroom_paged"
"""Name in transformers' registries."""

_PART = 128
"""Queries whose masks are made at once."""


@contextmanager
def attends_through(model: PreTrainedModel, name: str, function: Callable[..., object]) -> Iterator[None]:
    """Inside, ``model`` attends through ``function``, which transformers knows by ``name``, and makes no masks."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, _no_mask)
    with attention_named(configs_of(model), name):
        yield


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    paged: PagedBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_others: object,
) -> tuple[torch.Tensor, None]:
    """transformers' interface.

    Args:
        query: [1, Hq, T, D], the batch's tokens.
        key, value: [1, Hk, S, D or Dv]: what ``PagedCache.update`` returned.
        paged: describes the batch.
        sliding_window: only so many of the last tokens are seen, the token itself included.
        s_aux: [Hq], attention sinks: logits of a place that takes weight and adds nothing.

    Returns:
        [1, T, Hq, Dv], None.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not paged.spans:
        return _attend_first(module, query, key, value, paged, scale, sliding_window, s_aux), None
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    if paged.singles:
        singles = query[:, :, : paged.singles]
        out[:, : paged.singles] = _attend_first(module, singles, key, value, paged, scale, sliding_window, s_aux)
    for span in paged.spans:
        queries = slice(span.query_start, span.query_start + span.query_num)
        with _without_cudnn():
            result = attend_span(query[:, :, queries], key, value, span, scale, sliding_window, s_aux)
        out[:, queries] = result.transpose(1, 2)
    return out, None


def _attend_first(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    paged: PagedBatch,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The batch's single tokens, from blocks or from what was gathered."""
    if paged.single_lengths is not None:
        return attend_each(query, key, value, paged.single_lengths, scale, window, sinks)
    if paged.single_keys is not None:
        return attend_singles(query, key, value, paged.single_keys, paged.lengths, scale, window, sinks)
    assert isinstance(module.layer_idx, int)
    layer, blocks = paged.cache.layers[module.layer_idx], (paged.tables, paged.lengths, paged.cache.block_size)
    assert isinstance(layer, PagedLayer)
    if paged.cache.latent:
        return _attend_latents(module, query, layer, blocks, scale)
    from greenroom.kernels.gpu.paged_attention import paged_decode_attention  # needs triton

    return paged_decode_attention(query, layer.keys, layer.values, *blocks, scale, window, sinks)


def _attend_latents(
    module: nn.Module,
    query: torch.Tensor,
    layer: PagedLayer,
    blocks: tuple[torch.Tensor, torch.Tensor, int],
    scale: float,
) -> torch.Tensor:
    """query: [1, H, n, D], its first part without positions -> [1, n, H, Dv]."""
    from greenroom.kernels.gpu.latent_attention import latent_decode_attention  # needs triton

    to_key, to_value = latent_projections(module, query.shape[1])
    plain, rotated = query[0].split([to_key.shape[1], query.shape[3] - to_key.shape[1]], dim=-1)
    sums = latent_decode_attention(plain @ to_key, rotated, layer.keys, layer.values, *blocks, scale)
    return (sums.transpose(0, 1) @ to_value.transpose(1, 2)).transpose(0, 1)[None]


def latent_projections(module: nn.Module, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a layer with latent attention, views of one weight: [H, D without positions, R] and [H, Dv, R]."""
    assert isinstance(module.kv_b_proj, nn.Linear)
    assert isinstance(module.qk_nope_head_dim, int)
    weight = module.kv_b_proj.weight.unflatten(0, (heads, -1))
    return weight[:, : module.qk_nope_head_dim], weight[:, module.qk_nope_head_dim :]


def attend_each(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of each sequence over the sequence's keys, one sequence after another: on a CPU that is faster than
    padding all to the longest, and no sequence's sums depend on the length of another.

    Args:
        query: [1, Hq, n, D]; key, value: [1, Hk, S, D or Dv], each sequence's behind those of the one before.
        lengths: keys of each.

    Returns:
        [1, n, Hq, Dv].
    """
    heads, key_heads = query.shape[1], key.shape[1]
    # Query heads that share a key head are rows of one query.
    asked = query[0].transpose(0, 1).unflatten(1, (key_heads, heads // key_heads))
    if sinks is not None:
        sinks = sinks.view(1, key_heads, heads // key_heads)
    results, end = [], 0
    for row, length in enumerate(lengths):
        end += length
        own = slice(end - (length if window is None else min(length, window)), end)
        keys, values = key[:, :, own], value[:, :, own]
        seen = None if sinks is None else torch.ones(1, 1, 1, keys.shape[2], dtype=torch.bool)
        results.append(_attend(asked[row : row + 1], keys, values, seen, scale, sinks))
    return torch.cat(results).flatten(1, 2)[None]


def attend_singles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    places: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
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
    position = torch.arange(places.shape[1], device=lengths.device)
    seen = position < lengths[:, None]
    if window is not None:
        seen &= position >= lengths[:, None] - window
    if sinks is not None:
        sinks = sinks.view(1, key_heads, heads // key_heads)
    result = _attend(asked, keys, values, seen[:, None, None], scale, sinks)
    return result.reshape(1, rows, heads, -1)


def attend_span(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    span: Span,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The new tokens of one sequence over all of it, each up to itself.

    Args:
        query: [1, Hq, T, D]; key, value: [1, Hk, S, D or Dv].

    Returns:
        [1, Hq, T, Dv].
    """
    keys = slice(span.key_start, span.key_start + span.key_num)
    key, value = key[:, :, keys], value[:, :, keys]
    if sinks is None and (window is None or window >= span.key_num):
        grouped = query.shape[1] != key.shape[1]
        if span.query_num == span.key_num:
            causal: dict[str, Any] = {"is_causal": True}
        else:
            causal = {"attn_mask": causal_lower_right(span.query_num, span.key_num)}
        result: torch.Tensor = scaled_dot_product_attention(
            query, key, value, scale=scale, enable_gqa=grouped, **causal
        )
        return result
    return torch.cat(
        [
            _attend_masked(part, key, value, span.key_num - span.query_num + first, scale, window, sinks)
            for first, part in zip(range(0, span.query_num, _PART), query.split(_PART, 2), strict=True)
        ],
        dim=2,
    )


def _attend_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Some tokens of one sequence, the first one at ``start``, over those keys that they see."""
    heads, key_heads, tokens = query.shape[1], key.shape[1], query.shape[2]
    end = start + tokens
    lowest = 0 if window is None else max(0, start + 1 - window)
    key, value = (t[:, :, lowest:end].repeat_interleave(heads // key_heads, 1) for t in (key, value))
    own = torch.arange(start, end, device=query.device)[:, None]
    other = torch.arange(lowest, end, device=query.device)
    seen = other <= own
    if window is not None:
        seen &= other > own - window
    if sinks is not None:
        sinks = sinks.view(1, heads, 1)
    return _attend(query, key, value, seen[None, None], scale, sinks)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """
    Args:
        query: [B, H, T, D]; key, value: [B, H, S, D or Dv]; seen: bool, broadcasts to [B, H, T, S]; None for all, if
            there are no sinks.
        sinks: of each query, broadcasts to [B, H, T].
    """
    mask = seen
    if sinks is not None:
        assert seen is not None
        # A sink is a key whose product is its logit, with a value of zeros.
        key, value = (torch.cat([t, t.new_zeros(*t.shape[:2], 1, t.shape[3])], 2) for t in (key, value))
        shape = (*query.shape[:3], seen.shape[-1])
        hidden = torch.zeros(shape, dtype=query.dtype, device=query.device).masked_fill(~seen, float("-inf"))
        mask = torch.cat([hidden, sinks.to(query.dtype).expand(query.shape[:3])[..., None]], -1)
    result: torch.Tensor = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return result


def _without_cudnn() -> AbstractContextManager[None]:
    """cuDNN plans anew for every length, and chunks have many."""
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    context: AbstractContextManager[None] = sdpa_kernel(others)
    return context


def _no_mask(*_: object, **_others: object) -> None:
    """The batch says who sees whom."""
