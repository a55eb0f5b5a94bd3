"""What a model's layers keep of a token, and how they attend, found by running one token through it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from greenroom.engine.cache_argument import cache_argument
from greenroom.engine.offload import offload_of
from greenroom.engine.paged.attention import attends_through
from greenroom.engine.paged.cache import KvShape


@dataclass(frozen=True)
class PagedModel:
    """
    Attributes:
        shapes: of each layer.
        expanded: whether attention gets something else than what is cached, as with latent attention.
    """

    shapes: tuple[KvShape, ...]
    expanded: bool


@dataclass(frozen=True)
class _Call:
    """What one layer's attention was given. key: [1, Hk, 1, D], value: [1, Hk, 1, Dv]."""

    key: torch.Tensor
    value: torch.Tensor
    others: dict[str, Any]


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
    calls: list[_Call] = []
    if others := {type(layer).__name__ for layer in cache.layers} - {
        DynamicLayer.__name__,
        DynamicSlidingWindowLayer.__name__,
    }:
        return f"{type(model).__name__} keeps more than keys and values: {', '.join(sorted(others))}"
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    no_experts: Callable[..., torch.Tensor] = lambda _layer, hidden, _ids, _weights: hidden  # noqa: E731
    with offload.manager.without_host(no_experts), attends_through(model, _PROBE, _record):
        ids = torch.zeros(1, 1, dtype=torch.long, device=offload.device)
        model(input_ids=ids, use_cache=True, probe_calls=calls, **{cache_argument(model): cache})
    if len(calls) != len(windows) or not all(layer.is_initialized for layer in cache.layers):
        return f"layers of {type(model).__name__} share keys and values, or do not attend through transformers"
    expanded = False
    for layer, window, call in zip(cache.layers, windows, calls, strict=True):
        if call.others.get("sliding_window") != window:
            return f"attention of {type(model).__name__} is not told its window"
        if special := [name for name in _SPECIAL if call.others.get(name) is not None]:
            return f"attention of {type(model).__name__} has a {special[0]}"
        expanded |= call.key.shape[1:] != layer.keys.shape[1:] or call.value.shape[1:] != layer.values.shape[1:]
    return PagedModel(
        tuple(
            KvShape(kept.keys.shape[1], kept.keys.shape[3], kept.values.shape[1], kept.values.shape[3], kept.keys.dtype)
            for kept in cache.layers
        ),
        expanded,
    )


def _record(
    _module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None = None,
    *,
    probe_calls: list[_Call],
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """In place of attention."""
    probe_calls.append(_Call(key, value, others))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
