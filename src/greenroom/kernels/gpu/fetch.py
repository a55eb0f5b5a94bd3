"""The fetch kernel: copies the experts that cross PCIe from host memory into the fetch buffer or cache slots.

Plain wide loads of whole stretches reach the link's rate; tiles of a matrix product do not. What it leaves there
has an expert's own layout, so the kernels behind it need not know where a block came from.
"""

import triton
import triton.language as tl


@triton.jit
def fetch_kernel(
    fetch_source,
    fetch_target,
    entry_num,
    block_bytes,
    STRETCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (cdiv(block_bytes, 4 * STRETCH), fetch slots).

    Args:
        fetch_source, fetch_target: int64 [slots], addresses of the blocks to copy, and of where to.
        entry_num: int32 [3], of which the third is the number of them.
        block_bytes: of an expert, a multiple of 4.
        STRETCH: words of 4 bytes that one program copies, in steps of BLOCK.
    """
    slot = tl.program_id(1)
    if slot < tl.load(entry_num + 2):
        # Blocks are aligned to that at least; without being told, loads are of 4 bytes.
        source = tl.multiple_of(tl.load(fetch_source + slot).to(tl.pointer_type(tl.int32)), 16)
        target = tl.multiple_of(tl.load(fetch_target + slot).to(tl.pointer_type(tl.int32)), 16)
        words = block_bytes // 4
        for first in tl.static_range(0, STRETCH, BLOCK):
            word = tl.program_id(0) * STRETCH + first + tl.arange(0, BLOCK)
            tl.store(target + word, tl.load(source + word, mask=word < words), mask=word < words)
