"""The largest pass, once, before anybody waits for one."""

from collections.abc import Callable
from contextlib import suppress

import torch
from transformers import PreTrainedModel

from greenroom.engine.batch import SequenceChunk
from greenroom.engine.demand import with_room
from greenroom.engine.offload import offload_of
from greenroom.engine.paged.runner import PagedRunner


def rehearse(model: PreTrainedModel, runner: PagedRunner) -> None:
    """Runs the largest pass that ``runner`` takes, of tokens that nobody asked for; on a GPU twice.

    What it needs is then known to be there, its kernels are loaded, and the memory that the process holds is what it
    will hold. Nothing is counted or learnt from it, and no KV block may be in use.

    Raises:
        EngineError: it failed, for want of memory most likely.
    """
    offload = offload_of(model)
    chunks = largest_pass(runner, model.config.get_text_config().vocab_size)
    with offload.manager.warm_up():
        if offload.device.type == "cuda":
            _keep_room(offload.device, lambda: runner.run(chunks))
        runner.run(chunks)


def _keep_room(device: torch.device, work: Callable[[], object]) -> None:
    """Has torch keep one piece of memory for what ``work`` allocates and frees again, and little else.

    What it gathers piece by piece for activations of ever other sizes may be more than twice as much.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    most = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    # Without the room there is still what the pass needs, as it has just shown.
    with suppress(torch.OutOfMemoryError):
        torch.empty(with_room(most), dtype=torch.uint8, device=device)


def largest_pass(runner: PagedRunner, vocabulary: int) -> list[SequenceChunk]:
    """As few and as long sequences as give ``max_tokens`` in all, or as many as there are KV blocks for. Tokens differ,
    since equal ones would all choose the same experts."""
    left, free = runner.max_tokens, list(range(runner.num_blocks))
    chunks: list[SequenceChunk] = []
    while left > 0 and free and len(chunks) < runner.max_sequences:
        tokens = min(left, runner.max_context, len(free) * runner.block_size)
        blocks = -(-tokens // runner.block_size)
        chunks.append(SequenceChunk([token % vocabulary for token in range(tokens)], 0, free[:blocks]))
        left, free = left - tokens, free[blocks:]
    return chunks
