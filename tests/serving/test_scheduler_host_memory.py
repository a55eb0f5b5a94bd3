"""Scheduler: KV blocks that have a second home in host memory."""

from greenroom.kv.base import Transfers
from greenroom.serving.scheduler import Scheduler
from greenroom.serving.sequence import Sequence
from tests.serving.scheduling import Offload, add, make, step, stepped


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
        scheduler.finish(stepped(scheduler, 0, 3))
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
        scheduler.finish(stepped(scheduler, 0, 9))
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
