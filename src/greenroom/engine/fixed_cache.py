"""FixedCache: transformers' KV cache of fixed size, for decode steps of one token."""

import torch
from transformers import PretrainedConfig, StaticCache
from transformers.cache_utils import DynamicCache, StaticLayer

from greenroom.kernels.gpu.cache_write import write_token


class _FixedLayer(StaticLayer):
    """All layers have one length, which they leave alone: one addition a step counts for all."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token a row.

        Args:
            key_states, value_states: [rows, heads, 1, dim].
        """
        if key_states.shape[2] != 1:
            raise ValueError(f"a fixed cache takes a token at a time, not {key_states.shape[2]}")
        key, value = (new if new.stride(-1) == 1 else new.contiguous() for new in (key_states, value_states))
        write_token(self.keys, self.values, key, value, self.cumulative_length)
        return self.keys, self.values


class FixedCache(StaticCache):
    """Takes over what a prefill has cached, then one token a step, behind as many as ``length`` says."""

    def __init__(self, config: PretrainedConfig, rows: int, max_length: int, length: torch.Tensor) -> None:
        """
        Args:
            config: of a model that has a plain K/V cache.
            rows: sequences of up to ``max_length`` tokens.
            length: int64 [1] on the device, tokens of each row; whoever runs the steps changes it between them.
        """
        super().__init__(config=config, max_cache_len=max_length)
        self._rows = rows
        self._length = length
        layers = config.get_text_config(decoder=True).num_hidden_layers
        self.layers = [_FixedLayer(max_length) for _ in range(layers)]

    def take_over(self, cache: DynamicCache, length: int) -> None:
        """Copies the first rows' keys and values.

        Args:
            length: tokens that ``cache`` has of each row.
        """
        for dynamic, fixed in zip(cache.layers, self.layers, strict=True):
            rows = len(dynamic.keys)
            if not fixed.is_initialized:
                one_row = dynamic.keys[:1], dynamic.values[:1]
                fixed.lazy_initialization(*(row.expand(self._rows, -1, -1, -1) for row in one_row))
                fixed.cumulative_length = self._length
            fixed.keys[:rows, :, :length] = dynamic.keys
            fixed.values[:rows, :, :length] = dynamic.values
