"""The combine kernel: adds up what the GPU's and the CPU's experts contribute to each token."""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def combine_kernel(
    out,
    partial,
    gpu_ids,
    cpu_num,
    box_out,
    box_done,
    box_busy,
    step,
    note_spans,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    MAY_MISS: tl.constexpr,
    TIMED: tl.constexpr,
):
    """Grid (tokens, cdiv(HIDDEN, BLOCK)), behind a wait for the mailbox if experts MAY_MISS, as in ``dispatch_kernel``.

    Args:
        out: written: [tokens, HIDDEN]; zeros in rows of padding.
        partial: float32 [tokens, TOP_K, HIDDEN], weighted outputs of the GPU's pairs.
        gpu_ids: int32 [tokens, TOP_K], -1 where the GPU has no pair.
        cpu_num: int32 [1], experts that the CPU computes.
        box_out: float32 [tokens, HIDDEN] in host memory, the CPU's weighted sums; read only if cpu_num > 0.
        box_done: int32 [1] in host memory, reset here for the next step.
        box_busy: int64 [1] in host memory, nanoseconds that the CPU took; read only if cpu_num > 0.
        step: int32 [>= 1], first of all the rows that are no padding.
        note_spans: int64 [4], see ``Notes``; the third and the fourth are written here.
    """
    token = tl.program_id(0)
    notes = (token == 0) & (tl.program_id(1) == 0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        mine = tl.load(gpu_ids + token * TOP_K + k) >= 0
        total += tl.load(partial + (token * TOP_K + k) * HIDDEN + column, mask=inside & mine, other=0.0)
    if MAY_MISS:
        asked = tl.load(cpu_num) > 0
        from_cpu = asked & (token < tl.load(step))
        # Not through L1: the CPU wrote these while this grid was waiting.
        busy = tl.load(box_busy, mask=asked & notes, other=0, cache_modifier=".cg")
        total += tl.load(box_out + token * HIDDEN + column, mask=inside & from_cpu, other=0.0, cache_modifier=".cg")
    tl.store(out + token * HIDDEN + column, total.to(out.dtype.element_ty), mask=inside)
    if notes:
        if MAY_MISS:
            tl.store(box_done, 0)
            tl.store(note_spans + 3, busy)
        if TIMED:
            tl.store(note_spans + 2, globaltimer())
