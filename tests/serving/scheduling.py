"""A scheduler, its requests and its passes, for tests of single decisions."""

from greenroom.kv.base import Transfers
from greenroom.serving.scheduler import Scheduler, SchedulerLimits
from greenroom.serving.sequence import Sequence

SIZE = 4


class Offload:
    """Has whatever it was told to have; jobs end when the test says so."""

    block_factor = 1

    def __init__(self) -> None:
        self.has = 0
        self.part = 0
        self.asked: list[tuple[bytes, list[int]]] = []
        self.touched: list[list[bytes]] = []
        self.offered: list[tuple[bytes, list[list[int]]]] = []
        self.begun: list[tuple[str, int, list[int]]] = []
        self.ended = Transfers()
        self.stores = False

    def lookup(self, keys) -> int:
        return min(self.has, len(keys))

    def start_load(self, keys, block_ids) -> int:
        return self._begin("load", block_ids)

    def touch(self, keys) -> None:
        self.touched.append([*keys])

    def lookup_part(self, after, tokens) -> tuple[bytes, int] | None:
        self.asked.append((after, [*tokens]))
        return (b"part", min(self.part, len(tokens))) if self.part and tokens else None

    def start_store(self, keys, block_ids, after, tokens) -> int | None:
        self.offered.append((after, [[*held] for held in tokens]))
        return self._begin("store", block_ids) if self.stores else None

    def poll(self) -> Transfers:
        ended, self.ended = self.ended, Transfers()
        return ended

    def _begin(self, kind, block_ids) -> int:
        self.begun.append((kind, len(self.begun), list(block_ids)))
        return len(self.begun) - 1


def make(num_blocks=8, max_sequences=4, max_tokens=16, reuse=True, offload=None, copy=lambda *_: None) -> Scheduler:
    return Scheduler(SchedulerLimits(SIZE, num_blocks, max_sequences, max_tokens, reuse), copy, offload)


def add(scheduler, order, length, letter=None, max_length=None) -> Sequence:
    first = letter if letter is not None else order
    sequence = Sequence(order, [100 * first + place for place in range(length)])
    scheduler.add(sequence, max_length or length + 1)
    return sequence


def step(scheduler, token=7) -> list[tuple[int, int]]:
    """One pass; (order, tokens) of each chunk."""
    planned = scheduler.plan()
    scheduler.check()
    scheduler.passed(planned)
    for item in planned:
        if item.samples:
            scheduler.append(item.sequence, token)
    scheduler.check()
    return [(item.sequence.order, len(item.chunk.token_ids)) for item in planned]


def stepped(scheduler, order, length) -> Sequence:
    """A request behind its first pass."""
    sequence = add(scheduler, order, length)
    step(scheduler)
    return sequence
