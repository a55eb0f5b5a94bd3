"""PagedRunner: forward passes over chunks of several sequences, whose keys and values are in blocks."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from greenroom.engine.batch import SequenceChunk
from greenroom.engine.cache_argument import cache_argument
from greenroom.engine.offload import offload_of
from greenroom.engine.paged.attention import attends_to_blocks
from greenroom.engine.paged.cache import KvShape, PagedCache
from greenroom.engine.paged.packing import Limits, Packing, check_chunks, pack
from greenroom.errors import EngineError


class PagedRunner:
    """A ``BatchRunner`` for models that remember keys and values alone.

    All chunks of a call are packed behind one another into one batch row, so that each expert is read once for all.

    Attributes:
        block_size, num_blocks, max_sequences, max_tokens: see ``BatchRunner``.
        max_context: tokens of one sequence at most.
    """

    def __init__(self, model: PreTrainedModel, shapes: Sequence[KvShape], limits: Limits) -> None:
        """
        Args:
            model: offloaded.
            shapes: what each of its layers keeps of a token.
        """
        self.block_size = limits.block_size
        self.num_blocks = limits.num_blocks
        self.max_sequences = limits.max_sequences
        self.max_tokens = limits.max_tokens
        self.max_context = limits.max_context
        self._limits = limits
        self._model = model
        self._device = offload_of(model).device
        self._cache_name = cache_argument(model)
        self._cache: PagedCache | None = PagedCache(shapes, limits.num_blocks, limits.block_size, self._device)

    @torch.no_grad()
    def run(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        """See ``BatchRunner``.

        Raises:
            ConfigError: the chunks are not what the runner takes.
            EngineError: the runner is closed, or the pass failed.
        """
        if self._cache is None:
            raise EngineError("the runner is closed")
        check_chunks(chunks, self._limits)
        return self._run_layer_by_layer(pack(chunks, self.block_size), self._cache)

    def close(self) -> None:
        """See ``BatchRunner``."""
        self._cache = None

    def _run_layer_by_layer(self, packing: Packing, cache: PagedCache) -> torch.Tensor:
        device = self._device
        cache.batch = cache.describe(packing, kernel=False)
        with attends_to_blocks(self._model):
            output = self._model(
                input_ids=torch.from_numpy(packing.ids).to(device)[None],
                position_ids=torch.from_numpy(packing.positions).to(device)[None],
                use_cache=True,
                logits_to_keep=torch.from_numpy(packing.last).to(device),
                paged=cache.batch,
                **{self._cache_name: cache},
            )
        logits: torch.Tensor = output.logits[0]
        return logits
