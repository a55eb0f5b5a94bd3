"""What a scheduler hands to a model: tokens of several sequences, and where their keys and values are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class SequenceChunk:
    """The next tokens of one sequence.

    token_ids: at least one. start: tokens of the sequence whose keys and values are there already.
    blocks: ids of the KV blocks that hold tokens 0 to ``start + len(token_ids)``, in order.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]


class BatchRunner(Protocol):
    """Runs a model over chunks of several sequences. One thread at a time.

    Attributes:
        block_size: tokens a KV block.
        num_blocks: KV blocks; their ids count from 0.
        max_sequences: sequences that one call takes at most. 1 if the model's cache is not made of blocks:
            then a chunk that starts at 0 begins a new sequence, and every other one continues it.
        max_tokens: tokens that one call takes at most.
    """

    block_size: int
    num_blocks: int
    max_sequences: int
    max_tokens: int

    def run(
        self,
        chunks: Sequence[SequenceChunk],
        meanwhile: Callable[[], None] | None = None,
        behind: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """One forward pass, which writes the chunks' keys and values into their blocks.

        Args:
            meanwhile: called once if the pass goes well: while the device computes, or where the pass needs the host,
                before it. It must not raise.
            behind: called once if the pass goes well, after ``meanwhile``, with what will be returned: as soon as the
                pass has been enqueued, to enqueue what comes behind it, which this call does not wait for. It must
                neither wait for the device nor raise.

        Returns:
            [len(chunks), vocabulary] on the device: logits behind each chunk's last token, until the next call.

        Raises:
            EngineError: the pass failed; what the chunks' new tokens left in the blocks is undefined.
        """

    def expect(self, chunks: Sequence[SequenceChunk]) -> None:
        """The next call of ``run`` will probably be for this very object; each chunk has one token by then.

        What can be done before the tokens are known may be done now, which is within ``behind``. If the next call is
        for something else, this one has had no effect. Does not raise.
        """

    def copy_block(self, source: int, target: int) -> None:
        """Enqueues a copy of what the first KV block holds into the second, behind all passes so far.

        Raises:
            EngineError: the runner is closed, or its cache is not made of blocks.
        """

    def close(self) -> None:
        """Frees graphs and KV memory. Idempotent. The model stays open."""
