"""PagedRunner: forward passes over chunks of several sequences, whose keys and values are in blocks."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from greenroom.engine.batch import SequenceChunk
from greenroom.engine.cache_argument import cache_argument
from greenroom.engine.capturable import why_host_needed, why_not_readable
from greenroom.engine.dbo import DboPolicy
from greenroom.engine.offload import offload_of
from greenroom.engine.paged.attention import PAGED, attends_through, paged_attention
from greenroom.engine.paged.cache import PagedCache
from greenroom.engine.paged.packing import Limits, Packing, pack, pack_rows, set_ids
from greenroom.engine.paged.probe import Kept, PagedModel
from greenroom.engine.sizes import buckets_to
from greenroom.errors import ConfigError, EngineError
from greenroom.kv.device_copies import BlockCopy, block_copy

if TYPE_CHECKING:
    from greenroom.engine.paged.decode import DecodeBuckets, Ready


class PagedRunner:
    """A ``BatchRunner`` for models that remember keys and values alone.

    All chunks of a call are packed behind one another into one batch row, so that each expert is read once for all.
    On a GPU, calls of few tokens, whether one a sequence or several, are CUDA graphs; their statistics are learnt while
    the next one runs.

    Attributes:
        block_size, num_blocks, max_sequences, max_tokens: see ``BatchRunner``.
        max_context: tokens of one sequence at most.
        eager_because: why calls of few tokens are no graphs; None if they are.
        dbo: which of those calls run as two halves at once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kept: PagedModel,
        limits: Limits,
        *,
        decode_path: bool | None = None,
        decode_tokens: int | None = None,
        watchdog_s: float = 30.0,
        dbo: str = "off",
    ) -> None:
        """
        Args:
            model: offloaded.
            kept: what each of its layers keeps of a token, from ``probe``.
            decode_path: calls of few tokens take the path without the host. None: on a GPU alone.
            decode_tokens: that such a call has at most. None: as many as there are graphs for.
            watchdog_s: seconds after which such a call that has not ended (on a CPU device: a layer) is given up.
            dbo: "on" runs such calls as two halves at once, "auto" where that measures faster, "off" never.

        Raises:
            ConfigError: ``dbo`` is on and nothing can run as halves.
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
        self.eager_because = self._why_eager(kept)
        hostless = decode_path if decode_path is not None else self.eager_because is None
        self.dbo = DboPolicy(dbo, buckets_to(self.max_sequences), self._why_no_halves(dbo, hostless))
        self._by_kernel = self._device.type == "cuda" and kept.kept is not Kept.OTHER
        self._cache: PagedCache | None = PagedCache(
            kept.shapes, limits.num_blocks, limits.block_size, self._device, kept.kept is Kept.LATENT
        )
        self._copy_block: BlockCopy | None = block_copy(self.kv_tensors)
        self._decode: DecodeBuckets | None = None
        self._expected: tuple[Sequence[SequenceChunk], Ready] | None = None  # by ``expect``, for the next call
        if hostless:
            # Needs triton, which GPU builds of torch bring.
            from greenroom.engine.paged import decode

            self._decode = decode.DecodeBuckets(
                model,
                self._cache,
                min(limits.max_tokens, decode_tokens or limits.max_tokens),
                limits.max_context,
                graph=self._device.type == "cuda",
                watchdog_s=watchdog_s,
                dbo=self.dbo,
            )

    @property
    def kv_tensors(self) -> list[torch.Tensor]:
        """The blocks: [num_blocks + 1, block_size, heads, dim] on the device, keys then values of each layer.

        Raises:
            EngineError: the runner is closed.
        """
        layers = self._open_cache().layers
        return [t.view(-1, self.block_size, *t.shape[1:]) for layer in layers for t in (layer.keys, layer.values)]

    @property
    def usable(self) -> bool:
        """Whether ``run`` may be called: neither closed nor given up."""
        return self._cache is not None and (self._decode is None or self._decode.hostless.given_up is None)

    @torch.no_grad()
    def prepare(self) -> None:
        """Captures every graph now, and compiles what else is, instead of when it is first needed: seconds in all.

        Raises:
            EngineError: the runner is closed, or a pass failed.
        """
        scratch = self._open_cache().scratch
        self.copy_block(scratch, scratch)
        self._expected = None
        if self._decode is not None:
            self._decode.prepare()

    def run(
        self,
        chunks: Sequence[SequenceChunk],
        meanwhile: Callable[[], None] | None = None,
        behind: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """See ``BatchRunner``.

        Raises:
            ConfigError: the chunks are not what the runner takes.
            EngineError: the runner is closed or was given up, or the pass failed.
        """
        cache = self._open_cache()
        expected, self._expected = self._expected, None
        try:
            if self._decode is not None:
                if expected is not None and expected[0] is chunks:
                    ready = expected[1]
                    set_ids(ready.packing, chunks, self._limits)
                    return self._decode.run(ready.packing, meanwhile, behind, ready)
                if _tokens_of(chunks) <= self._decode.max_rows:
                    return self._decode.run(pack_rows(chunks, self._limits), meanwhile, behind)
            packing = pack(chunks, self._limits)
            if meanwhile is not None:
                meanwhile()
            self.flush()
            logits = self._run_layer_by_layer(packing, cache)
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"the GPU has no memory left for a pass of {_tokens_of(chunks)} tokens; allow fewer, or fewer KV blocks"
            ) from error
        if behind is not None:
            behind(logits)
        return logits

    def expect(self, chunks: Sequence[SequenceChunk]) -> None:
        """See ``BatchRunner``."""
        self._expected = None
        if self._decode is None or len(chunks) > self._decode.max_rows:
            return
        try:
            packing = pack_rows([SequenceChunk((0,), chunk.start, chunk.blocks) for chunk in chunks], self._limits)
        except ConfigError:
            return  # ``run`` will say it, if it comes to that
        self._expected = chunks, self._decode.ready(packing)

    def flush(self) -> None:
        """Counts the last call, if that has not been done."""
        if self._decode is not None:
            self._decode.hostless.flush()

    @torch.no_grad()
    def copy_block(self, source: int, target: int) -> None:
        """See ``BatchRunner``."""
        self._open_cache()
        assert self._copy_block is not None
        self._copy_block(source, target)

    def close(self) -> None:
        """See ``BatchRunner``."""
        if self._decode is not None:
            self._decode.close()
        self._cache = self._decode = self._copy_block = self._expected = None

    def _open_cache(self) -> PagedCache:
        if self._cache is None:
            raise EngineError("the runner is closed")
        return self._cache

    def _why_eager(self, kept: PagedModel) -> str | None:
        if self._device.type != "cuda":
            return "the model runs on the CPU, which has no graphs"
        offload = offload_of(self._model)
        return why_not_by_kernel(self._model, kept) or why_not_readable(offload) or why_host_needed(self._model)

    def _why_no_halves(self, mode: str, hostless: bool) -> str | None:
        if not hostless:
            return f"decode steps are no graphs, since {self.eager_because}"
        if mode == "auto" and self._device.type != "cuda":
            return "it can gain nothing on a CPU"
        if offload_of(self._model).weights.selection.backend == "prefetch":
            return "weights that are prefetched (weights_offload_group_size) serve one pass at a time"
        return None

    @torch.no_grad()
    def _run_layer_by_layer(self, packing: Packing, cache: PagedCache) -> torch.Tensor:
        device = self._device
        cache.batch = cache.describe(packing, self._by_kernel)
        with attends_through(self._model, PAGED, paged_attention):
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


def why_not_by_kernel(model: PreTrainedModel, kept: PagedModel) -> str | None:
    """None if a kernel can attend to the blocks of ``model``, otherwise why not."""
    if kept.kept is not Kept.OTHER:
        return None
    return f"attention of {type(model).__name__} reads something else than what is cached"


def _tokens_of(chunks: Sequence[SequenceChunk]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)
