"""ExclusiveRunner: one sequence at a time, for models whose cache is more than keys and values of all tokens."""

from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from greenroom.engine.batch import SequenceChunk
from greenroom.engine.cache_argument import cache_argument
from greenroom.engine.dbo import DboPolicy
from greenroom.engine.offload import offload_of
from greenroom.engine.paged.packing import Limits, pack
from greenroom.errors import ConfigError, EngineError


class ExclusiveRunner:
    """A ``BatchRunner`` over transformers' own cache. Block ids say how long a sequence may become, and nothing else.

    Attributes:
        block_size, num_blocks, max_sequences, max_tokens: see ``BatchRunner``; ``max_sequences`` is 1.
        max_context: tokens of the sequence at most.
        dbo: that nothing runs as halves.
    """

    def __init__(self, model: PreTrainedModel, limits: Limits, dbo: DboPolicy | None = None) -> None:
        """``model``: offloaded."""
        self.dbo = dbo or DboPolicy.off("one sequence at a time")
        self.block_size = limits.block_size
        self.num_blocks = limits.num_blocks
        self.max_sequences = limits.max_sequences
        self.max_tokens = limits.max_tokens
        self.max_context = limits.max_context
        self._limits = limits
        self._model: PreTrainedModel | None = model
        self._device = offload_of(model).device
        self._cache_name = cache_argument(model)
        self._cache: DynamicCache | None = None
        self._length = 0  # tokens in the cache

    @torch.no_grad()
    def run(
        self,
        chunks: Sequence[SequenceChunk],
        meanwhile: Callable[[], None] | None = None,
        behind: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """See ``BatchRunner``.

        Raises:
            ConfigError: more than one chunk, too long, or one that continues another sequence than the last one.
            EngineError: the runner is closed, or the pass failed: the sequence is lost.
        """
        if self._model is None:
            raise EngineError("the runner is closed")
        packing = pack(chunks, self._limits)
        (chunk,) = chunks
        if chunk.start == 0:
            self._cache, self._length = DynamicCache(config=self._model.config), 0
        if self._cache is None or chunk.start != self._length:
            raise ConfigError(
                f"{type(self._model).__name__} continues one sequence, at token {self._length if self._cache else 0}, "
                f"not at {chunk.start}; start others at 0"
            )
        if meanwhile is not None:
            meanwhile()
        cache, self._cache = self._cache, None  # lost unless it goes well
        logits: torch.Tensor = self._model(
            input_ids=torch.from_numpy(packing.ids).to(self._device)[None],
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: cache},
        ).logits[:, -1]
        self._cache, self._length = cache, chunk.start + len(chunk.token_ids)
        if behind is not None:
            behind(logits)
        return logits

    def expect(self, chunks: Sequence[SequenceChunk]) -> None:
        """See ``BatchRunner``. There is nothing to do ahead."""

    def copy_block(self, source: int, target: int) -> None:
        """See ``BatchRunner``."""
        raise EngineError("the model's cache is not made of blocks, so none can be copied")

    def close(self) -> None:
        """See ``BatchRunner``."""
        self._cache = self._model = None
