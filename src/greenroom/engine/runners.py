"""Which runner a model takes."""

import logging

import torch
from transformers import PreTrainedModel

from greenroom.engine.batch import BatchRunner
from greenroom.engine.dbo import DboPolicy
from greenroom.engine.offload import offload_of
from greenroom.engine.paged.cache import block_bytes
from greenroom.engine.paged.exclusive import ExclusiveRunner
from greenroom.engine.paged.packing import Limits
from greenroom.engine.paged.probe import probe
from greenroom.engine.paged.runner import PagedRunner
from greenroom.engine.sizes import KV_BLOCK
from greenroom.errors import ConfigError, MemoryLimitError

logger = logging.getLogger(__name__)


def make_runner(
    model: PreTrainedModel,
    *,
    max_tokens: int,
    max_context: int,
    kv_bytes: int | None = None,
    num_blocks: int | None = None,
    block_size: int = KV_BLOCK,
    max_sequences: int = 32,
    dbo: str = "off",
) -> BatchRunner:
    """A runner for an offloaded model, closed with it at the latest.

    Args:
        max_tokens: that one call takes.
        max_context: tokens of one sequence, at most.
        kv_bytes: of the KV cache; or else
        num_blocks: of it. A model whose cache is not made of blocks needs neither.
        block_size: tokens a block.
        max_sequences: that one call takes; 1 if the model's cache is not made of blocks.
        dbo: "on" runs calls of one token a sequence as two halves at once, "auto" where that measures faster, "off"
            never.

    Raises:
        ConfigError: numbers that make no sense together, or ``dbo`` is on and nothing can run as halves.
        MemoryLimitError: not even one sequence of ``max_context`` tokens fits.
    """
    if min(max_tokens, max_context, block_size, max_sequences) < 1:
        raise ConfigError("max_tokens, max_context, block_size and max_sequences are at least 1")
    needed = -(-max_context // block_size)
    vocabulary = model.config.get_text_config().vocab_size
    kept = probe(model)
    if isinstance(kept, str):
        logger.info("one sequence at a time: %s", kept)
        whole = DboPolicy(dbo, (), f"one sequence at a time, since {kept}")
        alone = Limits(block_size, needed, 1, max_tokens, max_context, vocabulary)
        return _kept_by(model, ExclusiveRunner(model, alone, whole))
    if (kv_bytes is None) == (num_blocks is None):
        raise ConfigError("give either kv_bytes or num_blocks")
    size = block_bytes(kept.shapes, block_size)
    if num_blocks is None:
        assert kv_bytes is not None
        num_blocks = kv_bytes // size - 1  # one is for padding
    if num_blocks < needed:
        raise MemoryLimitError(
            f"a sequence of {max_context} tokens needs {(needed + 1) * size} bytes of KV cache, "
            f"{max(0, num_blocks + 1) * size} are there; allow more, or shorter sequences"
        )
    limits = Limits(block_size, num_blocks, max_sequences, max_tokens, max_context, vocabulary)
    try:
        return _kept_by(model, PagedRunner(model, kept, limits, dbo=dbo))
    except torch.OutOfMemoryError as error:
        raise MemoryLimitError(
            f"the GPU has no memory left for {(num_blocks + 1) * size} bytes of KV cache and for decode; allow less"
        ) from error


def dbo_of(model: PreTrainedModel) -> DboPolicy:
    """Which calls of the model's last runner run as halves."""
    runners = [each for each in offload_of(model).companions if isinstance(each, PagedRunner | ExclusiveRunner)]
    return runners[-1].dbo if runners else DboPolicy.off("nothing runs yet")


def _kept_by(model: PreTrainedModel, runner: PagedRunner | ExclusiveRunner) -> BatchRunner:
    """Closed with the model, before it."""
    offload_of(model).companions.append(runner)
    return runner
