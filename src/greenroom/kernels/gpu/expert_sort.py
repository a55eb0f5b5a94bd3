"""Pairs (token, expert) sorted by expert without the host: a counting sort in three kernels.

A chunk of pairs counts its experts; a sum over chunks says where each one's pairs of each expert begin; then every
pair knows its place. Stable and always the same: no atomics.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_TILE = 1 << 13
"""Pairs of a chunk times places: what one program compares at once."""

_CHUNKS, _COLUMNS = 128, 32
"""Tile of the sum over chunks."""


@dataclass(frozen=True)
class SortedPairs:
    """A layer's pairs in rising order of their expert's *place*, a number from 0 that says where its weights lie.

    Attributes:
        tokens: int32 [T * K], row of each sorted pair's token; 0 behind the last pair, since rows are read by them.
        places: int32 [T * K], place of each sorted pair; 0 behind the last pair.
        positions: int32 [T, K], where each pair lies among the sorted; -1 for those that are in no place.
        ends: int32 [places], sorted pairs up to and with each place.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor


@triton.jit
def _places_of(ids, place_of, pair, pairs, experts, MAPPED: tl.constexpr):
    """int32: place of each pair's expert; -1 for ids outside [0, experts) and behind the last pair."""
    expert = tl.load(ids + pair, mask=pair < pairs, other=-1)
    known = (expert >= 0) & (expert < experts)
    if MAPPED:
        return tl.load(place_of + expert, mask=known, other=-1)
    return tl.where(known, expert, -1).to(tl.int32)


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(
    counts,
    tokens,
    places,
    ids,
    place_of,
    pairs,
    experts,
    PLACES: tl.constexpr,
    CHUNK: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """Grid (chunks,). counts: written: int32 [chunks, PLACES], pairs of each place in each chunk.

    tokens, places: int32 [pairs], all set to 0: behind the last pair nobody else writes.
    """
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    place = tl.arange(0, PLACES)
    mine = _places_of(ids, place_of, pair, pairs, experts, MAPPED)[:, None] == place[None, :]
    tl.store(counts + chunk * PLACES + place, tl.sum(mine.to(tl.int32), axis=0))
    zero = tl.zeros((CHUNK,), tl.int32)
    tl.store(tokens + pair, zero, mask=pair < pairs)
    tl.store(places + pair, zero, mask=pair < pairs)


@triton.jit(do_not_specialize=["chunks"])
def sum_kernel(
    counts,
    totals,
    chunks,
    PLACES: tl.constexpr,
    TILES: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (PLACES / COLUMNS,). counts: each becomes the sum of those of the chunks before.

    totals: written: int32 [PLACES]. TILES: of CHUNKS chunks each, as many as it takes or more.
    """
    place = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), tl.int32)
    for tile in range(TILES):
        chunk = tile * CHUNKS + tl.arange(0, CHUNKS)
        at = counts + chunk[:, None] * PLACES + place[None, :]
        count = tl.load(at, mask=chunk[:, None] < chunks, other=0)
        up_to = tl.cumsum(count, axis=0)
        tl.store(at, before[None, :] + up_to - count, mask=chunk[:, None] < chunks)
        before += tl.sum(count, axis=0)
    tl.store(totals + place, before)


@triton.jit(do_not_specialize=["pairs", "num_places"])
def place_kernel(
    tokens,
    places,
    positions,
    ends,
    ids,
    place_of,
    counts,
    totals,
    pairs,
    experts,
    num_places,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNK: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """Grid (chunks,). tokens, places, positions, ends: written, as in ``SortedPairs``.

    counts, totals: of ``sum_kernel``.
    """
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    place = tl.arange(0, PLACES)
    its_place = _places_of(ids, place_of, pair, pairs, experts, MAPPED)
    mine = (its_place[:, None] == place[None, :]).to(tl.int32)
    total = tl.load(totals + place)
    up_to = tl.cumsum(total, axis=0)
    start = up_to - total + tl.load(counts + chunk * PLACES + place)
    before = tl.cumsum(mine, axis=0) - mine + start[None, :]
    runs = its_place >= 0
    position = tl.where(runs, tl.sum(before * mine, axis=1), -1)
    tl.store(positions + pair, position, mask=pair < pairs)
    tl.store(tokens + position, pair // TOP_K, mask=runs)
    tl.store(places + position, its_place, mask=runs)
    if chunk == 0:
        tl.store(ends + place, up_to, mask=place < num_places)


def sort_by_expert(ids: torch.Tensor, place_of: torch.Tensor | None, experts: int, num_places: int) -> SortedPairs:
    """Nothing is read back to the host.

    Args:
        ids: integers [T, K], contiguous; ids outside [0, experts) are skipped.
        place_of: int32 [experts], each one's place, -1 for experts that do not run here; None if it is its number.
        num_places: at least one more than the greatest place.
    """
    pairs, device = ids.numel(), ids.device
    width = max(triton.next_power_of_2(num_places), _COLUMNS)
    chunk = max(16, min(128, _TILE // width))
    chunks = triton.cdiv(pairs, chunk)
    numbers = torch.empty(chunks + 1, width, dtype=torch.int32, device=device)
    counts, totals = numbers[:chunks], numbers[chunks]
    tokens, places, positions = torch.empty(3, pairs, dtype=torch.int32, device=device)
    ends = torch.empty(num_places, dtype=torch.int32, device=device)
    shape = {"PLACES": width, "CHUNK": chunk, "MAPPED": place_of is not None}
    count_kernel[(chunks,)](counts, tokens, places, ids, place_of, pairs, experts, **shape)
    tiles = triton.next_power_of_2(triton.cdiv(chunks, _CHUNKS))  # few different ones, each of which is compiled
    sum_kernel[(width // _COLUMNS,)](
        counts, totals, chunks, PLACES=width, TILES=tiles, CHUNKS=_CHUNKS, COLUMNS=_COLUMNS
    )
    place_kernel[(chunks,)](
        tokens,
        places,
        positions,
        ends,
        ids,
        place_of,
        counts,
        totals,
        pairs,
        experts,
        num_places,
        TOP_K=ids.shape[1],
        **shape,
    )
    return SortedPairs(tokens, places, positions.view(ids.shape), ends)
