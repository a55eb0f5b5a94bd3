"""PagedCache: keys and values of all layers in blocks, behind transformers' interface of a cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from greenroom.engine.paged.packing import Packing, Span


@dataclass(frozen=True)
class KvShape:
    """What one layer keeps of a token. Keys and values may differ, as those of latent attention do."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return (self.key_heads * self.key_dim + self.value_heads * self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class PagedBatch:
    """What attention needs to know of a forward pass over packed sequences. All tensors on the device.

    slots: int64 [T], where new keys and values go.
    singles: the first tokens of the batch, each the only new one of its sequence.
    tables: int64 [singles, W], blocks; lengths: int64 [singles], tokens that each sees.
    single_keys: int64 [singles, longest], where each one's keys are among those gathered. single_lengths: on a CPU
        instead of it, how many keys each has there, one's behind those of the one before. Both None: a kernel reads
        them from their blocks.
    gather: int64 [S], slots of the keys that attention gets; None if it gets the new ones alone.
    spans: chunks of several tokens.
    """

    cache: "PagedCache"
    slots: torch.Tensor
    singles: int
    tables: torch.Tensor
    lengths: torch.Tensor
    single_keys: torch.Tensor | None
    single_lengths: list[int] | None
    gather: torch.Tensor | None
    spans: tuple[Span, ...]

    @property
    def size(self) -> tuple[int, int]:
        """Tokens, and keys that attention gets."""
        return len(self.slots), len(self.slots if self.gather is None else self.gather)


def block_bytes(shapes: Sequence[KvShape], block_size: int) -> int:
    """Bytes of one block in all layers."""
    return block_size * sum(shape.token_bytes for shape in shapes)


class PagedLayer(CacheLayerMixin):
    """One layer's blocks.

    Attributes:
        keys, values: [blocks * block_size, heads, dim] on the device.
    """

    def __init__(self, shape: KvShape, slots: int, device: torch.device) -> None:
        super().__init__()
        # Zeros: rows of padding read what nobody wrote, and must stay finite.
        self.keys = torch.zeros(slots, shape.key_heads, shape.key_dim, dtype=shape.dtype, device=device)
        self.values = torch.zeros(slots, shape.value_heads, shape.value_dim, dtype=shape.dtype, device=device)
        self.is_initialized = True

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value: [1, heads, T, dim]; slots: int64 [T]."""
        self.keys.index_copy_(0, slots, key[0].transpose(0, 1))
        self.values.index_copy_(0, slots, value[0].transpose(0, 1))

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """slots: int64 [S] -> two of [1, heads, S, dim]."""
        return self.keys[slots].transpose(0, 1)[None], self.values[slots].transpose(0, 1)[None]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Not used; the cache writes."""
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of masks that attention does not look at."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Positions are given with every pass."""
        return 0

    def get_max_length(self) -> int:
        """No limit that transformers should know."""
        return -1

    get_max_cache_shape = get_max_length


class PagedCache(Cache):
    """Blocks of all layers, and one more that rows of padding may use.

    Attributes:
        batch: of the pass that runs; set before it.
        scratch: id of the block for padding.
        latent: keys are latents and values rotated keys, as latent attention caches them.
    """

    def __init__(
        self,
        shapes: Sequence[KvShape],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        latent: bool = False,
    ) -> None:
        slots = (num_blocks + 1) * block_size
        super().__init__(layers=[PagedLayer(shape, slots, device) for shape in shapes])
        self.block_size = block_size
        self.scratch = num_blocks
        self.latent = latent
        self.device = device
        self.batch: PagedBatch | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new keys and values, [1, heads, T, dim], and returns what the batch wants attention to get."""
        assert self.batch is not None
        layer = self.layers[layer_idx]
        layer.write(self.batch.slots, key_states, value_states)
        return (key_states, value_states) if self.batch.gather is None else layer.read(self.batch.gather)

    def describe(self, packing: Packing, kernel: bool) -> PagedBatch:
        """
        Args:
            kernel: single tokens read their keys from blocks, through a kernel.
        """
        gather, single_keys, single_lengths, spans = packing.gather, None, None, packing.spans
        if not kernel and packing.singles:
            # Their keys come before the others'.
            own = _slots_of_singles(packing, self.block_size)
            if self.device.type == "cpu":
                single_lengths = packing.lengths.tolist()
            else:
                single_keys = torch.from_numpy(_padded_places(packing.lengths)).to(self.device)
            spans = tuple(Span(s.query_start, s.query_num, s.key_start + len(own), s.key_num) for s in spans)
            gather = np.concatenate([own, gather])
        return PagedBatch(
            cache=self,
            slots=torch.from_numpy(packing.slots).to(self.device),
            singles=packing.singles,
            tables=torch.from_numpy(packing.tables).to(self.device),
            lengths=torch.from_numpy(packing.lengths).to(self.device),
            single_keys=single_keys,
            single_lengths=single_lengths,
            gather=torch.from_numpy(gather).to(self.device) if len(gather) else None,
            spans=spans,
        )


def _slots_of_singles(packing: Packing, block_size: int) -> np.ndarray:
    """int64 [S]: their sequences' slots, one after another."""
    every = (packing.tables[:, :, None] * block_size + np.arange(block_size)).reshape(packing.singles, -1)
    return np.concatenate([row[:length] for row, length in zip(every, packing.lengths, strict=True)])


def _padded_places(lengths: np.ndarray) -> np.ndarray:
    """int64 [n, longest]: where each one's are in those slots; the last one again and again behind its end."""
    starts = np.cumsum(lengths) - lengths
    places: np.ndarray = starts[:, None] + np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
    return places
