"""Slots that are offered to a step, in the cache: what may change, and when. Against a model of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.experts.cache import ExpertCache, SlotWrite
from greenroom.experts.landing import RESIDENT, SLOT, OfferedSlots, list_slots
from greenroom.experts.residency import ABSENT, Swap


def filled_cache() -> ExpertCache:
    """One layer of six experts and three slots: expert 4 in slot 0, expert 1 in slot 2, slot 1 free."""
    cache = ExpertCache([6], [3])
    for expert, slot in ((4, 0), (1, 2)):
        cache.map_landed(cache.unmap_and_write(0, Swap(expert, slot, ABSENT)))
    return cache


def offered(cache: ExpertCache, slots: list[list[int]]) -> OfferedSlots:
    """Of each layer, what its places shall be; ABSENT for none."""
    places = np.full((*np.shape(slots), 3), ABSENT)
    places[:, :, SLOT] = slots
    places[:, :, RESIDENT] = np.take_along_axis(cache.expert_in, np.maximum(slots, 0), axis=1)
    return list_slots(places)


def test_what_lands_enters_the_map_behind_the_step():
    cache = filled_cache()
    before = cache.version.copy()
    cache.offer(offered(cache, [[0, 1, ABSENT]]))
    cache.check()
    assert (cache.version - before).tolist() == [[1, 1, 0]]
    assert cache.layer_map(0).tolist() == [ABSENT, 2, ABSENT, ABSENT, 0, ABSENT], "the step still reads the resident"
    assert cache.at_stake().tolist() == [[False, False, False, False, True, False]]
    assert cache.free_slots().tolist() == [[False] * 3]
    entered, left = cache.settle(np.array([[5, ABSENT, 3]]))
    cache.check()
    assert (entered, left) == ([0], [0])
    assert cache.layer_map(0).tolist() == [ABSENT, 2, ABSENT, ABSENT, ABSENT, 0]
    assert (cache.version - before).tolist() == [[2, 2, 0]]
    assert not cache.at_stake().any()


def test_a_failed_step_leaves_offered_slots_empty():
    cache = filled_cache()
    cache.offer(offered(cache, [[0, 1]]))
    assert cache.forfeit() == [0]
    cache.check()
    assert cache.layer_map(0).tolist() == [ABSENT, 2, ABSENT, ABSENT, ABSENT, ABSENT]
    assert cache.free_slots().tolist() == [[True, True, False]]
    assert cache.forfeit() == []  # nothing is offered any more
    assert cache.layer_map(0)[1] == 2


def test_an_expert_that_is_on_its_way_by_copy_does_not_land_as_well():
    cache = filled_cache()
    cache.offer(offered(cache, [[0]]))
    write = cache.unmap_and_write(0, Swap(3, 1, ABSENT))
    assert cache.settle(np.array([[3]]))[0] == []
    cache.check()
    cache.map_landed(write)
    cache.check()
    assert cache.layer_map(0).tolist() == [ABSENT, 2, ABSENT, 1, ABSENT, ABSENT]


def test_what_is_offered_is_neither_written_by_a_copy_nor_offered_again():
    cache = filled_cache()
    cache.offer(offered(cache, [[0, 1]]))
    for swap in (Swap(3, 1, ABSENT), Swap(3, 0, 4)):
        with pytest.raises(ValueError, match="does not hold"):
            cache.unmap_and_write(0, swap)
    with pytest.raises(ValueError, match="being written"):
        cache.offer(offered(cache, [[1]]))
    cache.settle(np.array([[ABSENT, ABSENT]]))
    cache.unmap_and_write(0, Swap(3, 1, ABSENT))
    with pytest.raises(ValueError, match="being written"):
        cache.offer(offered(cache, [[1]]))
    assert cache.may_be_offered().tolist() == [[True, False, True]]


def test_two_offers_at_once_end_in_their_order():
    cache = filled_cache()
    told = cache.told_map()
    cache.offer(offered(cache, [[0]]))
    cache.offer(offered(cache, [[2, 1]]))
    cache.check()
    assert cache.at_stake().tolist() == [[False, True, False, False, True, False]]
    assert cache.told_map() is told, "nothing has landed yet"
    assert cache.settle(np.array([[5, ABSENT]])) == ([0], [0])
    assert cache.layer_map(0).tolist() == [ABSENT, 2, ABSENT, ABSENT, ABSENT, 0]
    assert cache.told_map().tolist() == cache.slot_of.tolist()
    assert told.tolist() == [[ABSENT, 2, ABSENT, ABSENT, 0, ABSENT]], "somebody may still read it"
    cache.check()
    cache.withdraw()
    cache.check()
    assert cache.version[0].tolist() == [4, 2, 4]
    assert not cache.at_stake().any()


def test_all_offers_of_failed_steps_end():
    cache = filled_cache()
    cache.offer(offered(cache, [[0]]))
    cache.offer(offered(cache, [[2, 1]]))
    assert cache.forfeit() == [0, 0]
    cache.check()
    assert (cache.slot_of == ABSENT).all()


def test_what_was_chosen_before_is_offered_unless_a_copy_spoils_it():
    cache = filled_cache()
    chosen = offered(cache, [[0, 1]])
    cache.prepare_offer(chosen)
    cache.check()
    assert cache.version[0].tolist() == [2, 0, 2], "not offered yet"
    write = cache.unmap_and_write(0, Swap(3, 1, ABSENT))
    with pytest.raises(ValueError, match="being written"):
        cache.offer(chosen)
    cache.map_landed(write)
    with pytest.raises(ValueError, match="does not hold"):
        cache.offer(chosen)
    chosen = offered(cache, [[2, 1]])
    cache.prepare_offer(chosen)
    cache.offer(chosen)
    cache.check()
    assert cache.version[0].tolist() == [2, 3, 3]
    cache.settle(np.array([[ABSENT, 5]]))
    cache.check()
    assert cache.layer_map(0).tolist() == [ABSENT, 2, ABSENT, ABSENT, 0, 1]
    with pytest.raises(ValueError, match="does not hold"):
        cache.prepare_offer(chosen)


def test_another_choice_than_the_prepared_one_may_be_offered():
    cache = filled_cache()
    cache.prepare_offer(offered(cache, [[0, 1]]))
    cache.offer(offered(cache, [[2]]))
    assert cache.version[0].tolist() == [2, 0, 3]
    cache.forfeit()
    cache.check()


@pytest.mark.parametrize("slots", [0, 4])
def test_layers_that_hold_nothing_or_everything_offer_nothing(slots):
    assert not ExpertCache([4], [slots]).may_be_offered().any()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_of_offers_copies_and_landings(data):
    """Map and slots agree whatever happens, and an expert is never in two slots."""
    experts, slots = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 5))
    cache = ExpertCache([experts] * 2, [min(slots, experts)] * 2)
    flying: list[SlotWrite] = []
    mapped: list[np.ndarray] = []  # of each open offer, at its begin
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["copy", "arrive", "offer", "settle", "withdraw", "fail"])):
            case "copy":
                layer = data.draw(st.integers(0, 1))
                absent = np.flatnonzero((cache.slot_of[layer] == ABSENT) & ~cache.being_written()[layer])
                still = np.flatnonzero(cache.version[layer] % 2 == 0)
                if len(absent) and len(still):
                    slot = int(data.draw(st.sampled_from(list(still))))
                    expert = int(data.draw(st.sampled_from(list(absent))))
                    flying.append(cache.unmap_and_write(layer, Swap(expert, slot, int(cache.expert_in[layer, slot]))))
            case "arrive" if flying:
                cache.map_landed(flying.pop(0))
            case "offer" if len(mapped) < 2:
                may = cache.may_be_offered()
                places = np.full((2, 2), ABSENT)
                for layer in range(2):
                    chosen = np.flatnonzero(may[layer])[: data.draw(st.integers(0, 2))]
                    places[layer, : len(chosen)] = chosen
                mapped.append(cache.slot_of.copy())
                cache.offer(offered(cache, places))
            case "settle" if mapped:
                landed, began = np.full((2, 2), ABSENT), mapped.pop(0)
                for layer in range(2):
                    absent = np.flatnonzero(began[layer] == ABSENT)
                    for place, expert in zip(range(data.draw(st.integers(0, 2))), absent, strict=False):
                        landed[layer, place] = expert
                before = (cache.slot_of != ABSENT).sum(axis=1)
                entered, left = cache.settle(landed)
                change = np.bincount(entered, minlength=2) - np.bincount(left, minlength=2)
                assert ((cache.slot_of != ABSENT).sum(axis=1) == before + change).all()
            case "withdraw" if mapped:
                cache.withdraw()
                mapped.pop()
            case "fail":
                cache.forfeit()
                mapped.clear()
        assert (cache.told_map() == cache.slot_of).all()
        cache.check()
