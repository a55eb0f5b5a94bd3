"""Scheduler: single decisions. What comes of many of them is in test_loop."""

import pytest

from greenroom.errors import ConfigError
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


class TestAdmission:
    def test_in_order_of_arrival_as_seats_allow(self) -> None:
        scheduler = make(max_sequences=2)
        sequences = [add(scheduler, order, 2) for order in (1, 0, 2)]
        assert step(scheduler) == [(0, 2), (1, 2)]
        scheduler.finish(sequences[0])
        assert step(scheduler) == [(0, 1), (2, 2)]

    def test_what_can_never_fit_is_refused(self) -> None:
        scheduler = make(num_blocks=8)
        add(scheduler, 0, 5, max_length=32)
        with pytest.raises(ConfigError, match="33 tokens do not fit the KV cache of 32"):
            add(scheduler, 1, 5, max_length=33)

    def test_what_does_not_fit_now_waits_and_holds_those_behind_it(self) -> None:
        scheduler = make(num_blocks=8)
        first, second, _ = add(scheduler, 0, 12), add(scheduler, 1, 17), add(scheduler, 2, 1)
        assert step(scheduler) == [(0, 12)]
        assert scheduler.waiting[0] is second
        assert len(scheduler.waiting) == 2
        scheduler.finish(first)
        assert [order for order, _ in step(scheduler)] == [1, 2]

    def test_blocks_promised_to_a_prompt_are_not_given_away(self) -> None:
        scheduler = make(num_blocks=8, max_tokens=8)
        add(scheduler, 0, 20)  # 5 blocks and one to go on with; two passes have to come
        add(scheduler, 1, 8)
        assert step(scheduler) == [(0, 8)]
        assert step(scheduler) == [(0, 8)]
        assert scheduler.preemptions == 0

    def test_the_last_token_is_always_computed(self) -> None:
        scheduler = make()
        scheduler.finish(self.done(scheduler, 0, 8))
        again = add(scheduler, 1, 8, letter=0)
        assert step(scheduler) == [(1, 1)]
        assert again.cached_tokens == 7

    def done(self, scheduler, order, length) -> Sequence:
        sequence = add(scheduler, order, length)
        step(scheduler)
        return sequence

    def test_nothing_is_shared_if_the_cache_is_not_made_of_blocks(self) -> None:
        scheduler = make(max_sequences=1, reuse=False)
        scheduler.finish(self.done(scheduler, 0, 8))
        again = add(scheduler, 1, 8, letter=0)
        assert step(scheduler) == [(1, 8)]
        assert again.cached_tokens == 0


class TestPrefixes:
    def test_equal_prompts_are_computed_once(self) -> None:
        scheduler = make(num_blocks=40, max_tokens=16)
        same = [add(scheduler, order, 41, letter=0) for order in range(4)]
        passes = []
        while any(len(sequence.tokens) == 41 for sequence in same):
            passes.append(step(scheduler))
        assert sum(count for chunks in passes for _, count in chunks) < 41 + 4 * 16
        assert all(sequence.cached_tokens >= 32 for sequence in same[1:])
        assert all(sequence.blocks[:8] == same[0].blocks[:8] for sequence in same)

    def test_an_adopted_block_takes_the_place_of_a_half_computed_one(self) -> None:
        scheduler = make(num_blocks=20, max_tokens=8)
        first, second = add(scheduler, 0, 21, letter=0), add(scheduler, 1, 21, letter=0)
        step(scheduler)
        scheduler._make_room(second, 6)
        second.computed = 6
        scheduler._reuse.register(second)
        step(scheduler)
        assert second.blocks[1] == first.blocks[1]
        assert second.computed == 8
        assert second.cached_tokens == 2


class TestParts:
    """Of blocks. Blocks hold 4 tokens."""

    def copying(self, **limits) -> tuple[Scheduler, list[tuple[int, int]]]:
        copied: list[tuple[int, int]] = []
        return make(**limits, copy=lambda source, target: copied.append((source, target))), copied

    def answered(self, scheduler, order, tokens, passes=1) -> list[int]:
        """Tokens of a request that ran alone and ended."""
        sequence = Sequence(order, [*tokens])
        scheduler.add(sequence, 12)
        for _ in range(passes):
            step(scheduler)
        scheduler.finish(sequence)
        scheduler.check()
        return sequence.tokens

    def begun(self, scheduler, order, tokens) -> Sequence:
        sequence = Sequence(order, [*tokens])
        scheduler.add(sequence, 16)
        step(scheduler)
        return sequence

    def test_a_tail_that_nobody_uses_is_taken_over(self) -> None:
        scheduler, copied = self.copying()
        said = self.answered(scheduler, 0, range(6), passes=4)  # 10 tokens, the last one is not computed
        assert scheduler.pool.used == 0
        turn = self.begun(scheduler, 1, [*said, 50, 51])
        assert turn.cached_tokens == 9
        assert not copied
        scheduler.finish(turn)
        again = self.begun(scheduler, 2, [*said, 50, 51])
        assert again.cached_tokens == 11  # all but the last one; its block had become full

    def test_a_tail_that_goes_on_differently_is_copied(self) -> None:
        scheduler, copied = self.copying()
        self.answered(scheduler, 0, [1, 2, 3, 4, 5, 6, 7])
        other = self.begun(scheduler, 1, [1, 2, 3, 4, 5, 6, 8])
        assert other.cached_tokens == 6
        assert copied == [(copied[0][0], other.blocks[1])]
        assert copied[0][0] != other.blocks[1]
        third = self.begun(scheduler, 2, [1, 2, 3, 4, 5, 6, 7, 8])  # the source is still there
        assert third.cached_tokens == 7

    def test_the_middle_of_a_full_block(self) -> None:
        scheduler, copied = self.copying()
        self.answered(scheduler, 0, range(13))
        edited = self.begun(scheduler, 1, [0, 1, 2, 3, 4, 5, 90, 91, 92])
        assert edited.cached_tokens == 6
        assert len(copied) == 1
        assert self.begun(scheduler, 2, [70, 1, 2, 3, 4]).cached_tokens == 0
        assert self.begun(scheduler, 3, [0]).cached_tokens == 0  # the last token is always computed

    def test_a_running_request_serves_the_end_of_its_prompt(self) -> None:
        scheduler, copied = self.copying()
        first = self.begun(scheduler, 0, range(7))
        step(scheduler)
        second = self.begun(scheduler, 1, range(7))
        assert second.cached_tokens == 6
        assert copied == [(first.blocks[1], second.blocks[1])]

    def test_part_of_a_block_that_others_have_computed_since(self) -> None:
        scheduler, copied = self.copying(max_tokens=7)
        first, second = (Sequence(order, [*range(7)]) for order in range(2))
        scheduler.add(first, 30)
        scheduler.add(second, 30)
        while len(second.tokens) == 7:
            step(scheduler)
        assert second.cached_tokens == 6
        assert copied == [(first.blocks[1], second.blocks[1])]

    def test_what_has_less_than_is_computed_is_left_alone(self) -> None:
        scheduler, copied = self.copying(max_tokens=2)
        self.answered(scheduler, 0, [0, 1, 2, 3, 4, 90, 91], passes=4)
        sequence = Sequence(1, [*range(9)])
        scheduler.add(sequence, 16)
        assert [step(scheduler) for _ in range(3)] == [[(1, 2)], [(1, 2)], [(1, 1)]]
        assert len(copied) == 1

    def test_a_preempted_request_goes_on_where_it_was(self) -> None:
        scheduler, copied = self.copying(num_blocks=6)
        first, second = self.begun(scheduler, 0, range(6)), self.begun(scheduler, 1, range(50, 56))
        scheduler._preempt(second)
        scheduler.check()
        assert step(scheduler) == [(0, 1), (1, 1)]
        assert second.cached_tokens == 0
        assert not copied
        assert first.computed == second.computed + 1

    def test_without_a_block_for_a_copy_it_is_computed(self) -> None:
        scheduler, copied = self.copying(num_blocks=3)
        self.answered(scheduler, 0, range(9), passes=1)
        sequence = Sequence(1, [0, 1, 2, 3, 4, 5, 70])
        scheduler.add(sequence, 9)
        held = scheduler.pool.allocate(1)  # 2 are left: what is shared, and the one that would be copied
        assert held is not None
        planned = scheduler.plan()
        assert [len(item.chunk.token_ids) for item in planned] == [3]
        assert not copied

    def test_nothing_if_the_cache_is_not_made_of_blocks(self) -> None:
        scheduler, copied = self.copying(max_sequences=1, reuse=False)
        self.answered(scheduler, 0, range(7))
        assert self.begun(scheduler, 1, range(7)).cached_tokens == 0
        assert not copied

    def test_what_a_request_had_before_it_was_preempted_is_not_counted(self) -> None:
        scheduler, _ = self.copying(max_tokens=4)
        self.answered(scheduler, 0, range(3))
        sequence = self.begun(scheduler, 1, range(12))
        assert sequence.cached_tokens == 3
        scheduler._preempt(sequence)
        while len(sequence.tokens) == 12:
            step(scheduler)
        assert sequence.cached_tokens == 3


class TestWaiting:
    """For what an older prompt computes. Blocks hold 4 tokens."""

    def begun(self, *prompts, **limits) -> tuple[Scheduler, list[Sequence]]:
        scheduler = make(**{"num_blocks": 60, "max_tokens": 64} | limits)
        sequences = [Sequence(order, [*prompt]) for order, prompt in enumerate(prompts)]
        for sequence in sequences:
            scheduler.add(sequence, len(sequence.tokens) + 8)
        return scheduler, sequences

    def test_one_computes_and_the_others_take_over(self) -> None:
        scheduler, sequences = self.begun(*[range(22)] * 4)
        assert [step(scheduler) for _ in range(2)] == [[(0, 22)], [(0, 1), (1, 1), (2, 1), (3, 1)]]
        assert [sequence.cached_tokens for sequence in sequences] == [0, 21, 21, 21]

    def test_a_prompt_shorter_than_a_block(self) -> None:
        scheduler, _ = self.begun(*[range(3)] * 3)
        assert [step(scheduler) for _ in range(2)] == [[(0, 3)], [(0, 1), (1, 1), (2, 1)]]

    def test_a_prompt_of_whole_blocks(self) -> None:
        scheduler, _ = self.begun(*[range(8)] * 2)
        assert [step(scheduler) for _ in range(2)] == [[(0, 8)], [(0, 1), (1, 1)]]

    def test_no_longer_than_for_what_is_the_same(self) -> None:
        scheduler, _ = self.begun(range(40), [*range(9), *range(60, 64)], max_tokens=16)
        assert step(scheduler) == [(0, 16)]
        assert step(scheduler) == [(0, 12), (1, 4)]  # the 9th token as well was taken over

    def test_what_mostly_differs_takes_what_is_left_of_a_pass(self) -> None:
        first, second = [*range(4), *range(50, 60)], [*range(4), *range(70, 80)]
        assert step(self.begun(first, second)[0]) == [(0, 14), (1, 14)]
        scheduler, _ = self.begun(first, second, max_tokens=14)  # nothing is left
        assert [step(scheduler) for _ in range(2)] == [[(0, 14)], [(0, 1), (1, 10)]]

    def test_its_turn_is_the_older_ones(self) -> None:
        """A short prompt goes before one in the middle, also if a long one computes its beginning."""
        scheduler, _ = self.begun(range(100), range(200, 230), range(13), max_tokens=32)
        assert step(scheduler) == [(0, 12), (1, 20)]
        assert step(scheduler)[2] == (2, 1)

    def test_decode_goes_on(self) -> None:
        scheduler, _ = self.begun(range(6))
        step(scheduler)
        for order in (1, 2):
            scheduler.add(Sequence(order, [*range(30, 42)]), 20)
        assert [step(scheduler) for _ in range(2)] == [[(0, 1), (1, 12)], [(0, 1), (1, 1), (2, 1)]]

    @pytest.mark.parametrize("how", ["finish", "_preempt"])
    def test_without_the_older_one_the_next_computes(self, how) -> None:
        scheduler, sequences = self.begun(*[range(22)] * 3, max_tokens=6)
        assert step(scheduler) == [(0, 6)]
        planned = scheduler.plan()
        assert [item.sequence for item in planned] == sequences[:1]
        getattr(scheduler, how)(sequences[0])  # it failed with its pass, say
        scheduler.waiting.clear()
        assert step(scheduler) == [(1, 6)]
        assert sequences[1].computed == 12  # 6 of them by the older one

    def test_an_older_one_without_blocks_is_not_waited_for(self) -> None:
        scheduler, sequences = self.begun(*[range(10)] * 2, num_blocks=7)
        scheduler._admit()
        held = scheduler.pool.allocate(5)
        assert held is not None
        assert scheduler.plan() == []  # both were given up
        scheduler.pool.release(held)
        scheduler.check()
        while any(len(sequence.tokens) == 10 for sequence in sequences):
            assert step(scheduler)

    def test_nobody_waits_if_the_cache_is_not_made_of_blocks(self) -> None:
        scheduler, _ = self.begun(*[range(8)] * 2, reuse=False)
        assert step(scheduler) == [(0, 8), (1, 8)]


class TestPreemption:
    def test_the_youngest_gives_up_its_blocks_and_comes_back_first(self) -> None:
        scheduler = make(num_blocks=6)
        old, young = add(scheduler, 0, 7, max_length=24), add(scheduler, 1, 7, max_length=24)
        for _ in range(6):
            step(scheduler)
        assert scheduler.preemptions == 0
        for _ in range(4):
            step(scheduler)
        assert scheduler.preemptions == 1
        assert scheduler.running == [old]
        add(scheduler, 2, 1)
        assert scheduler.waiting[0] is young
        scheduler.finish(old)
        assert step(scheduler)[0][0] == 1
        assert young.cached_tokens == 0  # of the prompt, when it came first

    def test_none_while_a_load_may_bring_a_younger_victim(self) -> None:
        offload = Offload()
        scheduler = make(num_blocks=6, offload=offload)
        old = add(scheduler, 0, 7, max_length=24)
        step(scheduler)
        offload.has = 1
        young = add(scheduler, 1, 7, max_length=24)
        step(scheduler)
        assert scheduler.loading == [young]
        while len(old.tokens) < 20:
            assert step(scheduler) == [(0, 1)]
        step(scheduler)
        assert step(scheduler) == []  # 5 of 6 blocks, one is being loaded: the old one waits, and keeps its own
        assert scheduler.running == [old]
        assert scheduler.preemptions == 0
        offload.ended = Transfers(done=(0,))
        assert step(scheduler) == [(0, 1)]
        assert scheduler.waiting == [young]
        assert scheduler.preemptions == 1

    def test_none_of_itself_while_stores_hold_blocks(self) -> None:
        offload = Offload()
        scheduler = make(num_blocks=4, offload=offload)
        offload.stores = True
        scheduler.finish(TestAdmission().done(scheduler, 0, 8))
        offload.stores = False
        only = add(scheduler, 1, 7, max_length=16)
        step(scheduler)
        step(scheduler)
        assert step(scheduler) == []
        assert scheduler.running == [only]
        offload.ended = Transfers(done=(0,))
        assert step(scheduler) == [(1, 1)]
        assert scheduler.preemptions == 0


class TestHostMemory:
    def loading(self, has=2, length=9) -> tuple[Scheduler, Offload, Sequence]:
        offload = Offload()
        offload.has = has
        scheduler = make(offload=offload)
        sequence = add(scheduler, 0, length)
        assert step(scheduler) == []
        assert scheduler.transferring
        return scheduler, offload, sequence

    def test_a_loaded_prefix_is_not_computed(self) -> None:
        scheduler, offload, sequence = self.loading()
        offload.ended = Transfers(done=(0,))
        assert step(scheduler) == [(0, 1)]
        assert sequence.cached_tokens == scheduler.loaded_tokens == 8
        assert not scheduler.transferring

    def test_what_could_not_be_loaded_is_computed(self) -> None:
        scheduler, offload, sequence = self.loading()
        offload.ended = Transfers(failed=(0,))
        assert step(scheduler) == [(0, 9)]
        assert sequence.cached_tokens == scheduler.loaded_tokens == 0

    def test_others_run_meanwhile(self) -> None:
        scheduler, offload, _ = self.loading()
        offload.has = 0
        add(scheduler, 1, 3)
        assert step(scheduler) == [(1, 3)]

    def test_blocks_stay_with_the_job_of_a_request_that_ended(self) -> None:
        scheduler, offload, sequence = self.loading()
        scheduler.finish(sequence)
        scheduler.check()
        assert scheduler.pool.used == 2
        offload.ended = Transfers(done=(0,))
        step(scheduler)
        assert scheduler.pool.used == 0
        assert not scheduler.transferring

    def test_the_last_token_is_not_loaded_either(self) -> None:
        _, offload, _ = self.loading(has=5, length=8)
        assert len(offload.begun[0][2]) == 1

    def test_blocks_that_are_stored_are_kept(self) -> None:
        offload = Offload()
        offload.stores = True
        scheduler = make(offload=offload)
        sequence = add(scheduler, 0, 9)
        step(scheduler)
        kind, job, blocks = offload.begun[0]
        assert (kind, blocks) == ("store", [*sequence.blocks[:2]])
        tail = sequence.blocks[2]
        scheduler.finish(sequence)
        assert offload.begun[1] == ("store", 1, [tail])
        assert offload.offered[1] == (sequence.keys[1], [[8]])
        assert scheduler.pool.used == 3
        offload.ended = Transfers(failed=(job,), done=(1,))
        step(scheduler)
        assert scheduler.pool.used == 0

    def test_a_tail_that_is_being_stored_is_copied_and_not_taken_over(self) -> None:
        offload = Offload()
        offload.stores = True
        copied: list[tuple[int, int]] = []
        scheduler = make(num_blocks=12, offload=offload, copy=lambda *pair: copied.append(pair))
        first = add(scheduler, 0, 6)
        step(scheduler)
        tail = first.blocks[1]
        scheduler.finish(first)
        second = add(scheduler, 1, 7, letter=0)
        step(scheduler)
        assert second.cached_tokens == 6
        assert copied == [(tail, second.blocks[1])]

    def test_part_of_a_block_is_loaded_behind_full_ones(self) -> None:
        offload = Offload()
        offload.has, offload.part = 1, 2
        scheduler = make(offload=offload)
        sequence = add(scheduler, 0, 9)
        assert step(scheduler) == []
        assert offload.asked == [(sequence.keys[0], [4, 5, 6, 7])]
        assert len(offload.begun[0][2]) == 2
        offload.ended = Transfers(done=(0,))
        assert step(scheduler) == [(0, 3)]
        assert sequence.cached_tokens == scheduler.loaded_tokens == 6

    def test_part_of_a_block_alone_is_loaded_if_the_device_has_less(self) -> None:
        offload = Offload()
        scheduler = make(offload=offload)
        scheduler.finish(TestAdmission().done(scheduler, 0, 3))
        offload.part = 3
        second = add(scheduler, 1, 4, letter=0)
        assert step(scheduler) == [(1, 1)]  # three tokens are here
        scheduler.finish(second)
        third = Sequence(2, [0, 77, 78, 79])
        scheduler.add(third, 5)
        assert step(scheduler) == []
        assert scheduler.loading == [third]
        offload.ended = Transfers(failed=(0,))
        assert step(scheduler) == [(2, 3)]  # one token is here
        assert third.cached_tokens == 1

    def test_no_tails_where_host_blocks_are_several(self) -> None:
        offload = Offload()
        offload.block_factor, offload.stores = 2, True
        scheduler = make(offload=offload)
        sequence = add(scheduler, 0, 14)
        step(scheduler)
        scheduler.finish(sequence)
        assert [len(blocks) for _, _, blocks in offload.begun] == [2]

    def test_what_is_given_up_is_not_stored(self) -> None:
        """Or those that need its blocks would have to wait."""
        offload = Offload()
        offload.stores = True
        scheduler = make(offload=offload)
        sequence = add(scheduler, 0, 3)
        step(scheduler)
        scheduler._preempt(sequence)
        assert not offload.begun

    def test_a_prefix_on_the_device_counts_as_used(self) -> None:
        offload = Offload()
        scheduler = make(offload=offload)
        scheduler.finish(TestAdmission().done(scheduler, 0, 9))
        assert offload.touched == []
        again = add(scheduler, 1, 9, letter=0)
        step(scheduler)
        assert offload.touched == [again.keys[:2]]
        scheduler.finish(again)
        offload.has = 1
        longer = Sequence(2, [*range(9), 90, 91, 92, 93])  # what is loaded behind it counts by itself
        scheduler.add(longer, 14)
        step(scheduler)
        assert scheduler.loading == [longer]
        assert len(offload.touched) == 1
