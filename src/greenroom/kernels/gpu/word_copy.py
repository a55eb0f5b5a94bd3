"""Small copies between a device and page-locked host memory that a step waits for.

By a kernel: a copy engine works through what it was given in order, and a copy of a few kilobytes would queue for some
hundred microseconds behind those of experts into cache slots.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


# One program for every number of words: compiling another takes longer than many copies.
@triton.jit(do_not_specialize=["word_num"])
def word_copy_kernel(target, source, word_num, BLOCK: tl.constexpr):
    """Grid (cdiv(word_num, BLOCK),). Copies integers of one size; either side may be in host memory."""
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Not through L1: the host may have written since the last time.
    tl.store(target + word, tl.load(source + word, mask=word < word_num, cache_modifier=".cg"), mask=word < word_num)


def copy_words(target: torch.Tensor, source: torch.Tensor) -> None:
    """Enqueues the copy on the current stream of the device; on a CPU device it has been made.

    Args:
        target, source: of one integer dtype and number of elements, contiguous; one on the device, the other in
            page-locked memory.
    """
    if target.device.type == source.device.type == "cpu":
        target.copy_(source, non_blocking=True)
        return
    word_copy_kernel[(triton.cdiv(source.numel(), _BLOCK),)](target, source, source.numel(), BLOCK=_BLOCK)
