"""GrowingLayer: keys and values with room behind them, where transformers copies all of them for every token."""

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

_LEAST_ROOM, _SHARE = 128, 8
"""Tokens that there is room for behind those that are there: at least so many, or an eighth of them."""


class GrowingLayer(DynamicLayer):
    """``keys`` and ``values`` are as in a ``DynamicLayer``, the beginning of larger tensors.

    What was taken from them is overwritten once they have been cropped and grow again.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self._key_room: torch.Tensor | None = None
        self._value_room: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values of new tokens, [B, heads, T, dim], and returns all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._grow(key_states, value_states)
        before = self.keys.shape[2] - key_states.shape[2]
        self.keys[:, :, before:] = key_states
        self.values[:, :, before:] = value_states
        return self.keys, self.values

    def grow(self) -> None:
        """Makes ``keys`` and ``values``, which are there, longer by a token that the caller is to write."""
        self._grow(self.keys[:, :, :1], self.values[:, :, :1])

    def _grow(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """By as many tokens as there are in tensors like these."""
        self.keys, self._key_room = _longer(self.keys, self._key_room, key)
        self.values, self._value_room = _longer(self.values, self._value_room, value)


def make_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache for ``model``. On a CPU layers that keep keys and values of all tokens grow in place; others are
    as transformers makes them."""
    cache = DynamicCache(config=model.config)
    if model.device.type == "cpu":
        cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _longer(seen: torch.Tensor, room: torch.Tensor | None, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """seen: [B, heads, S, dim], or empty. Returns it with room for ``new`` behind it, and what that is the begin of."""
    before = seen.shape[2] if seen.ndim == new.ndim else 0
    length = before + new.shape[2]
    if room is None or not before or not _begins(seen, room) or room.shape[2] < length:
        shape = *new.shape[:2], length + max(_LEAST_ROOM, length // _SHARE), new.shape[3]
        room = new.new_empty(shape)
        if before:
            room[:, :, :before] = seen
    return room[:, :, :length], room


def _begins(seen: torch.Tensor, room: torch.Tensor) -> bool:
    """Nobody has put another tensor in its place, as reordering a batch does."""
    return seen.data_ptr() == room.data_ptr() and seen.stride() == room.stride() and seen.shape[:2] == room.shape[:2]
