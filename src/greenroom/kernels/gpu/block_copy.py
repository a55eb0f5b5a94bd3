"""Copies the runs of KV blocks from one place to another, both by address: device memory, or page-locked host memory.

A few programs walk over all pieces: enough bytes are under way to fill PCIe, and most of the GPU stays free for the
model.
"""

import triton
import triton.language as tl


# One program for every number of blocks: compiling another takes longer than most transfers.
@triton.jit(do_not_specialize=["block_num"])
def block_copy_kernel(
    source_runs,
    source_pitches,
    target_runs,
    target_pitches,
    sizes,
    source_blocks,
    target_blocks,
    block_num,
    run_num,
    longest,
    WORD_BYTES: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Any grid of one dimension.

    Args:
        source_runs, target_runs: int64 [runs], addresses of block 0's runs.
        source_pitches, target_pitches: int64 [runs], bytes from a block's run to the next block's.
        sizes: int64 [runs], bytes.
        source_blocks, target_blocks: int64 [blocks], which to copy to which.
        longest: of the sizes.
        WORD_BYTES: 8, 4, 2 or 1; divides every address, pitch and size.
        WORD: integer type of that many bytes.
        BLOCK: words that a program moves at a time.
    """
    pointer: tl.constexpr = tl.pointer_type(WORD)
    chunk_num = tl.cdiv(longest, WORD_BYTES * BLOCK)
    piece = tl.program_id(0)
    while piece < block_num * run_num * chunk_num:
        unit = piece // chunk_num
        word = (piece % chunk_num) * BLOCK + tl.arange(0, BLOCK)
        run = unit % run_num
        block = unit // run_num
        inside = word < tl.load(sizes + run) // WORD_BYTES
        source = tl.load(source_runs + run) + tl.load(source_blocks + block) * tl.load(source_pitches + run)
        target = tl.load(target_runs + run) + tl.load(target_blocks + block) * tl.load(target_pitches + run)
        words = tl.load(source.to(pointer) + word, mask=inside)
        tl.store(target.to(pointer) + word, words, mask=inside)
        piece += tl.num_programs(0)
