"""The dispatch kernel: one thread block decides where each expert of a layer runs, and posts the CPU's share.

It is the decision of ``greenroom.experts.dispatch`` made on the device, without the host: resident experts
run from their slots; of the absent ones the first ``stream_num[absent]``, most pairs first, are read by the
GPU where they lie in host memory; the rest go to the CPU.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def dispatch_kernel(
    hidden,
    ids,
    weights,
    rows,
    slot_of,
    stream_num,
    entry_address,
    entry_expert,
    entry_num,
    gpu_ids,
    cpu_num,
    box_hidden,
    box_ids,
    box_cpu_ids,
    box_weights,
    box_request,
    box_done,
    spans,
    slot_base,
    host_base,
    block_bytes,
    NUM_EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    KEY_BITS: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
    TIMED: tl.constexpr,
):
    """Grid (1,).

    Args:
        hidden, ids, weights: [TOKENS, HIDDEN], integers [TOKENS, TOP_K], floats [TOKENS, TOP_K].
        rows: int32 [1], rows that are no padding; they come first. Others are routed nowhere.
        slot_of: int32 [NUM_EXPERTS], slot or -1.
        stream_num: int32 [NUM_EXPERTS + 1], how many of so many absent experts the GPU reads over PCIe.
        entry_address, entry_expert: written: int64 and int32 [entries], the experts that the GPU computes,
            those read over PCIe first, since they take longest.
        entry_num: written: int32 [2], entries in all and those read over PCIe.
        gpu_ids: written: int32 [TOKENS, TOP_K], the GPU's choices, -1 elsewhere.
        cpu_num: written: int32 [1], experts that the CPU computes.
        box_*: the layer's mailbox, in host memory. Behind the request word come the numbers of experts that
            are resident, streamed, and left to the CPU.
        spans: int64 [>= 3], the device's clock; the first is written here.
        slot_base, host_base: addresses of the layer's first slot and of its first expert in host memory.
        block_bytes: from one expert to the next, in both.
        KEY_BITS: of EXPERTS_POW2 * PAIRS_POW2 * 2.
    """
    count_rows = tl.load(rows)
    pair = tl.arange(0, PAIRS_POW2)
    real = pair < TOKENS * TOP_K
    chosen = tl.load(ids + pair, mask=real, other=-1).to(tl.int32)
    routed = real & (pair // TOP_K < count_rows) & (chosen >= 0) & (chosen < NUM_EXPERTS)
    safe = tl.where(routed, chosen, 0)

    expert = tl.arange(0, EXPERTS_POW2)
    pairs_of = tl.histogram(safe, EXPERTS_POW2, mask=routed)
    slot = tl.load(slot_of + expert, mask=expert < NUM_EXPERTS, other=-1)
    used = pairs_of > 0
    resident = used & (slot >= 0)
    absent = used & (slot < 0)
    absent_num = tl.sum(absent.to(tl.int32), axis=0)
    wanted = tl.load(stream_num + absent_num)

    # Most pairs first, then the lower id. Keys are unique, so exactly ``wanted`` of them reach the threshold.
    key = tl.where(absent, pairs_of * EXPERTS_POW2 + (EXPERTS_POW2 - 1 - expert), -1)
    threshold = 0
    for bit in tl.static_range(KEY_BITS):
        candidate = threshold + (1 << (KEY_BITS - 1 - bit))
        reached = tl.sum((key >= candidate).to(tl.int32), axis=0)
        threshold = tl.where(reached >= wanted, candidate, threshold)
    streamed = absent & (key >= threshold) & (wanted > 0)
    streamed_num = tl.sum(streamed.to(tl.int32), axis=0)
    on_gpu = resident | streamed

    place = tl.where(
        streamed, tl.cumsum(streamed.to(tl.int32), 0) - 1, streamed_num + tl.cumsum(resident.to(tl.int32), 0) - 1
    )
    address = tl.where(
        resident,
        slot_base + slot.to(tl.int64) * block_bytes,
        host_base + expert.to(tl.int64) * block_bytes,
    )
    tl.store(entry_address + place, address, mask=on_gpu)
    tl.store(entry_expert + place, expert, mask=on_gpu)
    resident_num = tl.sum(resident.to(tl.int32), axis=0)
    tl.store(entry_num, streamed_num + resident_num)
    tl.store(entry_num + 1, streamed_num)

    pair_on_gpu = routed & (tl.gather(on_gpu.to(tl.int32), safe, 0) > 0)
    tl.store(gpu_ids + pair, tl.where(pair_on_gpu, chosen, -1), mask=real)
    on_cpu = absent_num - streamed_num
    tl.store(cpu_num, on_cpu)

    tl.store(box_request + 1, resident_num)
    tl.store(box_request + 2, streamed_num)
    tl.store(box_request + 3, on_cpu)
    tl.store(box_ids + pair, tl.where(routed, chosen, -1), mask=real)
    tl.store(box_weights + pair, tl.load(weights + pair, mask=real).to(tl.float32), mask=real)
    if on_cpu > 0:
        tl.store(box_cpu_ids + pair, tl.where(routed & (pair_on_gpu == 0), chosen, -1), mask=real)
        for first in range(0, TOKENS * HIDDEN, COPY_BLOCK):
            element = first + tl.arange(0, COPY_BLOCK)
            inside = element < count_rows * HIDDEN
            tl.store(box_hidden + element, tl.load(hidden + element, mask=inside), mask=inside)
        # All threads' payload lies before the one that raises the flag: barrier, then release.
        tl.debug_barrier()
        tl.atomic_xchg(box_request, count_rows, sem="release", scope="sys")
    else:
        # Nobody else will answer this layer's wait.
        tl.debug_barrier()
        tl.atomic_xchg(box_done, 1, sem="release", scope="sys")
    if TIMED:
        tl.store(spans, globaltimer())
