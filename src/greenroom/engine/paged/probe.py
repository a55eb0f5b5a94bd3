"""What a model's layers keep of a token, and how they attend, found by running one token through it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from greenroom.engine.cache_argument import cache_argument
from greenroom.engine.offload import offload_of
from greenroom.engine.paged.attention import attends_through, latent_projections
from greenroom.engine.paged.cache import KvShape


class Kept(Enum):
    """What attention reads of what is cached.

    PLAIN: just that. LATENT: keys and values that one linear layer makes of it. OTHER: something else.
    """

    PLAIN = "plain"
    LATENT = "latent"
    OTHER = "other"


@dataclass(frozen=True)
class PagedModel:
    """
    Attributes:
        shapes: what each layer caches of a token.
        kept: how attention uses it, in the layer where it is most special.
    """

    shapes: tuple[KvShape, ...]
    kept: Kept


@dataclass(frozen=True)
class _Call:
    """What one layer's attention was given besides queries."""

    kept: Kept
    others: dict[str, Any]


@dataclass(frozen=True)
class _Calls:
    cache: DynamicCache
    made: list[_Call] = field(default_factory=list)


_PROBE = "greenroom_probe"

_SPECIAL = ("softcap", "position_bias")
"""Arguments of attention that blocks do not serve."""


@torch.no_grad()
def probe(model: PreTrainedModel) -> PagedModel | str:
    """
    Args:
        model: offloaded. Its experts do not run and nothing is counted.

    Returns:
        What a cache of blocks needs to know, or why the model cannot have one.
    """
    offload, cache = offload_of(model), DynamicCache(config=model.config)
    calls = _Calls(cache)
    if others := {type(layer).__name__ for layer in cache.layers} - {
        DynamicLayer.__name__,
        DynamicSlidingWindowLayer.__name__,
    }:
        return f"{type(model).__name__} keeps more than keys and values: {', '.join(sorted(others))}"
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    no_experts: Callable[..., torch.Tensor] = lambda _layer, hidden, _ids, _weights: hidden  # noqa: E731
    with offload.manager.without_host(no_experts), attends_through(model, _PROBE, _record):
        ids = torch.zeros(1, 1, dtype=torch.long, device=offload.device)
        model(input_ids=ids, use_cache=True, probe=calls, **{cache_argument(model): cache})
    if len(calls.made) != len(windows) or not all(layer.is_initialized for layer in cache.layers):
        return f"layers of {type(model).__name__} share keys and values, or do not attend through transformers"
    for window, call in zip(windows, calls.made, strict=True):
        if call.others.get("sliding_window") != window:
            return f"attention of {type(model).__name__} is not told its window"
        if special := [name for name in _SPECIAL if call.others.get(name) is not None]:
            return f"attention of {type(model).__name__} has a {special[0]}"
    shapes = [
        KvShape(kept.keys.shape[1], kept.keys.shape[3], kept.values.shape[1], kept.values.shape[3], kept.keys.dtype)
        for kept in cache.layers
    ]
    return PagedModel(tuple(shapes), _common([call.kept for call in calls.made]))


def _common(layers: list[Kept]) -> Kept:
    return layers[0] if len(set(layers)) == 1 else Kept.OTHER


def _record(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None = None,
    *,
    probe: _Calls,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """In place of attention."""
    layer = probe.cache.layers[len(probe.made)]
    probe.made.append(_Call(_classify(module, query, key, value, layer, others), others))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _classify(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: CacheLayerMixin,
    others: dict[str, Any],
) -> Kept:
    """By what attention was given: what a layer's attributes promise is checked, not believed."""
    if not layer.is_initialized:
        return Kept.OTHER
    if key.shape == layer.keys.shape and value.shape == layer.values.shape:
        return Kept.PLAIN if torch.equal(key, layer.keys) and torch.equal(value, layer.values) else Kept.OTHER
    projection = getattr(module, "kv_b_proj", None)
    if not isinstance(projection, nn.Linear) or "bias" in dict(projection.named_parameters()):
        return Kept.OTHER
    if key.shape[1] != query.shape[1]:
        return Kept.OTHER
    if layer.keys.shape[1] != 1 or layer.values.shape[1] != 1 or not isinstance(module.qk_nope_head_dim, int):
        return Kept.OTHER
    if any(others.get(name) is not None for name in ("sliding_window", "s_aux")):
        return Kept.OTHER
    to_key, to_value = latent_projections(module, query.shape[1])
    expected = (
        torch.cat([layer.keys[0] @ to_key.transpose(1, 2), layer.values[0].expand(key.shape[1], -1, -1)], -1),
        layer.keys[0] @ to_value.transpose(1, 2),
    )
    same = all(
        mine.shape == theirs[0].shape and torch.allclose(mine.float(), theirs[0].float(), rtol=0.05, atol=0.05)
        for mine, theirs in zip(expected, (key, value), strict=True)
    )
    return Kept.LATENT if same else Kept.OTHER
