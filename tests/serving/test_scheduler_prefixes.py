"""Scheduler: prompts that begin alike are computed once."""

import pytest

from greenroom.serving.scheduler import Scheduler
from greenroom.serving.sequence import Sequence
from tests.serving.scheduling import add, make, step


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
