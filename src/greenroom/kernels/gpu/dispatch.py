"""The dispatch kernel: one thread block decides where each expert of a layer runs, and posts the CPU's share.

It is the decision of ``greenroom.experts.dispatch`` made on the device, without the host: resident experts
run from their slots; of the absent ones the first few cross PCIe, those with most pairs and then most appeal
first; the rest go to the CPU.
Between the two at most one expert is divided: the GPU takes its first rows of the inner width and the CPU the
others, since a token or two need so few experts that whole ones would leave one side waiting.

Of those that cross whole some may land in cache slots, as far as the host offers any, instead of the fetch buffer.
The host's map may lack what has landed in the step before: then it is completed here (see ``ExpertCache``).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from greenroom.kernels.gpu.publish import publish

PARTS = tl.constexpr(16)
"""An expert's parts, in which the split between PCIe and CPU is counted."""

_PART_ROWS = tl.constexpr(32)
"""A divided expert is cut at multiples of so many rows of its inner width: CPU kernels work on tiles."""


@triton.jit
def dispatch_kernel(
    hidden,
    ids,
    weights,
    step,
    slot_of,
    stream_parts,
    appeal,
    places,
    entry_address,
    entry_expert,
    entry_rows,
    entry_num,
    fetch_source,
    fetch_target,
    gpu_ids,
    cpu_num,
    box_hidden,
    box_cpu_ids,
    box_weights,
    box_request,
    box_done,
    note_ids,
    note_weights,
    note_counts,
    note_spans,
    landings,
    slot_base,
    host_base,
    fetch_base,
    block_bytes,
    NUM_EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    FETCH_SLOTS: tl.constexpr,
    PLACES: tl.constexpr,
    MAY_MISS: tl.constexpr,
    LEADING: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    KEY_BITS: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
    TIMED: tl.constexpr,
):
    """Grid (1,).

    Args:
        hidden, ids, weights: [TOKENS, HIDDEN], integers [TOKENS, TOP_K], floats [TOKENS, TOP_K].
        step: int32 [3]. Rows that are no padding; they come first, others are routed nowhere. The step's number. That
            of the step before if ``slot_of`` lacks what has landed in it, otherwise one that no step had.
        slot_of: int32 [NUM_EXPERTS], slot or -1.
        stream_parts: int32 [NUM_EXPERTS + 1], how many parts of so many absent experts cross PCIe.
        appeal: int32 [NUM_EXPERTS], a permutation of 0 to NUM_EXPERTS - 1.
        places: int32 [PLACES, 4]: a slot or -1, the expert in it or -1, the least appeal to land there, nothing. A
            slot whose expert the batch uses is no place.
        entry_address, entry_expert, entry_rows: written: int64, int32, int32 [entries], the experts that the
            GPU computes, those that cross PCIe first, and how many rows of the inner width each has there.
        entry_num: written: int32 [3]: entries in all, those that cross PCIe, those to be copied.
        fetch_source, fetch_target: written: int64 [FETCH_SLOTS], where the first entries are to be copied from and
            to; they count as being there. Entries beyond are read where they lie.
        gpu_ids: written: int32 [TOKENS, TOP_K], the GPU's choices, -1 elsewhere.
        cpu_num: written: int32 [1], experts that the CPU computes.
        box_*: the layer's mailbox, in host memory. Behind the request word come the divided expert (-1 for none) and
            the CPU's first row of its inner width.
        note_ids, note_weights, note_counts, note_spans, landings: the layer's ``Notes``; of the spans the first is
            written here. ``landings`` still has those of the step before.
        slot_base, host_base, fetch_base: addresses of the layer's first slot, of its first expert in host
            memory, and of the fetch buffer.
        block_bytes: from one expert to the next, in all three.
        PLACES: at most FETCH_SLOTS.
        MAY_MISS: False if every expert has a slot for good: nobody then waits for the layer's mailbox.
        LEADING: only a token's so many heaviest choices land.
        KEY_BITS: of EXPERTS_POW2 * PAIRS_POW2 * 2.
    """
    count_rows = tl.load(step)
    pair = tl.arange(0, PAIRS_POW2)
    real = pair < TOKENS * TOP_K
    chosen = tl.load(ids + pair, mask=real, other=-1).to(tl.int32)
    routed = real & (pair // TOP_K < count_rows) & (chosen >= 0) & (chosen < NUM_EXPERTS)
    safe = tl.where(routed, chosen, 0)

    expert = tl.arange(0, EXPERTS_POW2)
    pairs_of = tl.histogram(safe, EXPERTS_POW2, mask=routed)
    slot = tl.load(slot_of + expert, mask=expert < NUM_EXPERTS, other=-1)
    for number in tl.static_range(PLACES):
        newcomer = tl.load(landings + 4 * number)
        entered = tl.load(landings + 4 * number + 1)
        displaced = tl.load(landings + 4 * number + 2)
        missing = (tl.load(landings + 4 * number + 3) == tl.load(step + 2)) & (newcomer >= 0)
        slot = tl.where(missing & (expert == displaced), -1, slot)
        slot = tl.where(missing & (expert == newcomer), entered, slot)
    used = pairs_of > 0
    resident = used & (slot >= 0)
    absent = used & (slot < 0)
    absent_num = tl.sum(absent.to(tl.int32), axis=0)
    rank = tl.load(appeal + expert, mask=expert < NUM_EXPERTS, other=-1)
    if MAY_MISS:
        parts = tl.load(stream_parts + absent_num)
        wanted = parts // PARTS
        divided_rows = parts % PARTS * INTER // PARTS // _PART_ROWS * _PART_ROWS
        # Most pairs first, then most appeal. Keys are unique, so exactly ``wanted`` of them reach the threshold.
        key = tl.where(absent, pairs_of * EXPERTS_POW2 + rank, -1)
        threshold = 0
        for bit in tl.static_range(KEY_BITS):
            candidate = threshold + (1 << (KEY_BITS - 1 - bit))
            reached = tl.sum((key >= candidate).to(tl.int32), axis=0)
            threshold = tl.where(reached >= wanted, candidate, threshold)
        streamed = absent & (key >= threshold) & (wanted > 0)
        streamed_num = tl.sum(streamed.to(tl.int32), axis=0)
        left = tl.where(streamed, -1, key)
        largest_left = tl.max(left, axis=0)
        divided = absent & (left == largest_left) & (largest_left >= 0) & (divided_rows > 0)
        divided_num = tl.sum(divided.to(tl.int32), axis=0)
    else:
        streamed, streamed_num = absent, absent_num
        divided, divided_num, divided_rows = absent, absent_num, absent_num
    resident_num = tl.sum(resident.to(tl.int32), axis=0)
    crossing_num = streamed_num + divided_num
    on_gpu = resident | streamed | divided

    waiting = tl.where(streamed, rank, -1)
    if LEADING < TOP_K:
        weight = tl.load(weights + pair, mask=real, other=0.0).to(tl.float32)
        heavier = tl.zeros((PAIRS_POW2,), tl.int32)
        for k in tl.static_range(TOP_K):
            other = tl.load(weights + pair // TOP_K * TOP_K + k, mask=real, other=0.0).to(tl.float32)
            heavier += ((other > weight) | ((other == weight) & (k < pair % TOP_K))).to(tl.int32)
        waiting = tl.where(tl.histogram(safe, EXPERTS_POW2, mask=routed & (heavier < LEADING)) > 0, waiting, -1)
    landing = tl.full((EXPERTS_POW2,), -1, tl.int32)
    if PLACES > 0:
        # All threads have read what has landed in the step before.
        tl.debug_barrier()
    for number in tl.static_range(PLACES):
        offered = tl.load(places + 4 * number)
        held = tl.load(places + 4 * number + 1)
        least = tl.load(places + 4 * number + 2)
        read = tl.sum((used & (expert == held)).to(tl.int32), axis=0)
        best = tl.max(waiting, axis=0)
        lands = (waiting == best) & (best >= 0) & (best >= least) & (offered >= 0) & (read == 0)
        tl.store(landings + 4 * number, tl.max(tl.where(lands, expert, -1), axis=0))
        tl.store(landings + 4 * number + 1, offered)
        tl.store(landings + 4 * number + 2, held)
        tl.store(landings + 4 * number + 3, tl.load(step + 1))
        landing = tl.where(lands, offered, landing)
        waiting = tl.where(lands, -1, waiting)
    lands = landing >= 0
    others = streamed & (landing < 0)

    # Those that land come first: they must be copied, not read where they lie.
    entry = tl.where(
        resident,
        crossing_num + tl.cumsum(resident.to(tl.int32), 0) - 1,
        tl.where(divided, streamed_num, tl.sum(lands.to(tl.int32), axis=0) + tl.cumsum(others.to(tl.int32), 0) - 1),
    )
    entry = tl.where(lands, tl.cumsum(lands.to(tl.int32), 0) - 1, entry)
    in_host = host_base + expert.to(tl.int64) * block_bytes
    fetched = streamed & (entry < FETCH_SLOTS)
    in_slot = slot_base + tl.where(lands, landing, slot).to(tl.int64) * block_bytes
    in_buffer = fetch_base + entry.to(tl.int64) * block_bytes
    address = tl.where(resident | lands, in_slot, tl.where(fetched, in_buffer, in_host))
    tl.store(fetch_source + entry, in_host, mask=fetched)
    tl.store(fetch_target + entry, address, mask=fetched)
    tl.store(entry_address + entry, address, mask=on_gpu)
    tl.store(entry_expert + entry, expert, mask=on_gpu)
    tl.store(entry_rows + entry, tl.where(divided, divided_rows, INTER), mask=on_gpu)
    tl.store(entry_num, crossing_num + resident_num)
    tl.store(entry_num + 1, crossing_num)
    tl.store(entry_num + 2, tl.minimum(streamed_num, FETCH_SLOTS))

    pair_on_gpu = routed & (tl.gather(on_gpu.to(tl.int32), safe, 0) > 0)
    pair_on_cpu = routed & (tl.gather((absent & (streamed == 0)).to(tl.int32), safe, 0) > 0)
    tl.store(gpu_ids + pair, tl.where(pair_on_gpu, chosen, -1), mask=real)
    on_cpu = absent_num - streamed_num
    tl.store(cpu_num, on_cpu)

    divided_expert = tl.max(tl.where(divided, expert, -1), axis=0)
    first_row = tl.where(divided_num > 0, divided_rows, 0)
    weight_of = tl.load(weights + pair, mask=real).to(tl.float32)
    tl.store(note_counts, resident_num)
    tl.store(note_counts + 1, streamed_num)
    tl.store(note_counts + 2, on_cpu)
    tl.store(note_counts + 3, divided_expert)
    tl.store(note_counts + 4, first_row)
    tl.store(note_ids + pair, tl.where(routed, chosen, -1), mask=real)
    tl.store(note_weights + pair, weight_of, mask=real)
    if MAY_MISS:
        if on_cpu > 0:
            tl.store(box_request + 1, divided_expert)
            tl.store(box_request + 2, first_row)
            tl.store(box_weights + pair, weight_of, mask=real)
            tl.store(box_cpu_ids + pair, tl.where(pair_on_cpu, chosen, -1), mask=real)
            for first in range(0, TOKENS * HIDDEN, COPY_BLOCK):
                element = first + tl.arange(0, COPY_BLOCK)
                inside = element < count_rows * HIDDEN
                tl.store(box_hidden + element, tl.load(hidden + element, mask=inside), mask=inside)
            publish(box_request, count_rows, TIMED)
        else:
            # Nobody else will answer this layer's wait.
            publish(box_done, 1, TIMED)
    if TIMED:
        tl.store(note_spans, globaltimer())
