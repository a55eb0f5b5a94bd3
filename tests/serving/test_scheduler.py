"""Scheduler: admission and preemption, single decisions. What comes of many of them is in test_loop."""

import pytest

from greenroom.errors import ConfigError
from greenroom.kv.base import Transfers
from tests.serving.scheduling import Offload, add, make, step, stepped


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
        scheduler.finish(stepped(scheduler, 0, 8))
        again = add(scheduler, 1, 8, letter=0)
        assert step(scheduler) == [(1, 1)]
        assert again.cached_tokens == 7

    def test_nothing_is_shared_if_the_cache_is_not_made_of_blocks(self) -> None:
        scheduler = make(max_sequences=1, reuse=False)
        scheduler.finish(stepped(scheduler, 0, 8))
        again = add(scheduler, 1, 8, letter=0)
        assert step(scheduler) == [(1, 8)]
        assert again.cached_tokens == 0


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
        scheduler.finish(stepped(scheduler, 0, 8))
        offload.stores = False
        only = add(scheduler, 1, 7, max_length=16)
        step(scheduler)
        step(scheduler)
        assert step(scheduler) == []
        assert scheduler.running == [only]
        offload.ended = Transfers(done=(0,))
        assert step(scheduler) == [(1, 1)]
        assert scheduler.preemptions == 0
