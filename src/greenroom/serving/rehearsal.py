"""The largest pass, once, before anybody waits for one."""

from transformers import PreTrainedModel

from greenroom.engine.batch import SequenceChunk
from greenroom.engine.offload import offload_of
from greenroom.engine.paged.runner import PagedRunner


def rehearse(model: PreTrainedModel, runner: PagedRunner) -> None:
    """Runs the largest pass that ``runner`` takes, of tokens that nobody asked for: what it needs is then known to be
    there, its kernels are loaded, and the memory that the process holds is what it will hold. Nothing is counted or
    learnt from it, and no KV block may be in use.

    Raises:
        EngineError: it failed, for want of memory most likely.
    """
    with offload_of(model).manager.warm_up():
        runner.run(largest_pass(runner, model.config.get_text_config().vocab_size))


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
