"""Landing in passing: what is offered, what the device makes of it, what enters the map. Against brute force."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.landing import LEAST, SLOT, Offers, choose_offers, list_slots
from greenroom.experts.mailbox import Mailboxes
from greenroom.experts.policies import make_policy
from greenroom.experts.residency import ABSENT, Swap, hold_back_replacements
from greenroom.experts.split import PARTS
from greenroom.experts.usage import ExpertUsage

FMT = ExpertFormat(32, 16, torch.bfloat16, Activation(ActivationKind.SILU))


@st.composite
def layers(draw):
    """scores, if_used, expert_in, writable, arriving of one layer."""
    experts = draw(st.integers(1, 9))
    slots = draw(st.integers(0, experts))
    numbers = st.lists(st.integers(0, 4).map(float), min_size=experts, max_size=experts)
    expert_in = np.full(slots, ABSENT, dtype=np.int32)
    held = draw(st.permutations(range(experts)))[: draw(st.integers(0, slots))]
    expert_in[draw(st.permutations(range(slots)))[: len(held)]] = held
    flags = st.lists(st.booleans(), min_size=slots, max_size=slots)
    arriving = np.array(draw(st.lists(st.booleans(), min_size=experts, max_size=experts)))
    arriving[list(held)] = False
    return (
        np.array(draw(numbers)),
        np.array(draw(numbers)),
        expert_in,
        np.array(draw(flags), dtype=bool),
        arriving,
    )


@given(layers(), st.integers(0, 4), st.sampled_from([1.0, 2.0]))
def test_offers_against_brute_force(layer, count, margin):
    scores, if_used, expert_in, writable, arriving = layer
    offers = choose_offers(*(part[None] for part in layer), count, margin)
    experts = len(scores)
    appeal, places = offers.appeal[0], offers.places[0]
    assert sorted(appeal) == list(range(experts))

    def worth(expert):
        return (not arriving[expert], if_used[expert] if not arriving[expert] else 0, scores[expert], -expert)

    assert sorted(range(experts), key=lambda e: appeal[e]) == sorted(range(experts), key=worth)
    free = [slot for slot in range(len(expert_in)) if writable[slot] and expert_in[slot] == ABSENT]
    full = [slot for slot in range(len(expert_in)) if writable[slot] and expert_in[slot] != ABSENT]
    full.sort(key=lambda slot: scores[expert_in[slot]])
    expected = (free + full)[:count]
    offered = [place for place in places if place[SLOT] != ABSENT]
    assert [place[SLOT] for place in offered] == expected
    for slot, resident, least in offered:
        assert resident == expert_in[slot]
        for expert in range(experts):
            better = resident == ABSENT or if_used[expert] > margin * scores[resident]
            assert (appeal[expert] >= least) == (better and not arriving[expert])


def test_a_shorter_layer_uses_its_own_ranks_alone():
    scores = np.array([[1.0, 2.0, 0.0, 0.0]])
    if_used = np.array([[1.0, 2.0, np.inf, np.inf]])
    offers = choose_offers(scores, if_used, np.array([[ABSENT]]), np.ones((1, 1), bool), np.zeros((1, 4), bool), 1, 1.0)
    assert offers.appeal[0, :2].tolist() == [0, 1]
    assert offers.places[0, 0, LEAST] == 0


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfru"])
def test_scores_as_if_all_had_been_used(policy):
    random = np.random.default_rng(0)
    usage = ExpertUsage(2, 5)
    for _ in range(6):
        usage.record_all(random.integers(0, 2, (2, 5)))
        usage.advance()
    before = copy.deepcopy(usage)
    supposed = make_policy(policy).scores(usage.if_all_were_used())
    assert (make_policy(policy).scores(usage) == make_policy(policy).scores(before)).all(), "nothing was recorded"
    usage.record_all(np.ones((2, 5)))
    assert (supposed == make_policy(policy).scores(usage)).all()


def test_places_as_the_cache_takes_them():
    slots = list_slots(np.array([[[3, ABSENT, 0], [1, 2, 4]], [[ABSENT] * 3, [0, 7, 1]], [[ABSENT] * 3] * 2]))
    assert (slots.layer.tolist(), slots.place.tolist()) == ([0, 0, 1], [0, 1, 1])
    assert (slots.slot.tolist(), slots.resident.tolist()) == ([3, 1, 0], [ABSENT, 2, 7])


def test_replacements_are_held_back_and_fills_are_not():
    swaps = [
        (0, Swap(1, 0, ABSENT, 1.0)),
        (0, Swap(2, 1, 5, 3.0)),
        (1, Swap(2, 1, 6, 9.0)),
        (1, Swap(4, 2, ABSENT, 0.5)),
    ]
    assert hold_back_replacements(swaps, 1) == [swaps[0], swaps[3], swaps[2]]
    assert hold_back_replacements(swaps, -1) == [swaps[0], swaps[3]]
    assert sorted(hold_back_replacements(swaps, 9), key=str) == sorted(swaps, key=str)


# --- the dispatch kernel

pytest.importorskip("triton")

from greenroom.experts import expert_launches  # noqa: E402
from greenroom.experts.decode_path import DecodePath  # noqa: E402
from greenroom.kernels.gpu.tiling import Tiling  # noqa: E402
from tests.experts.test_decode_path import DEVICE, Parts, check, decode, random_batch, run  # noqa: E402


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs one after another."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(expert_launches, "choose_tilings", lambda tokens, itemsize: (Tiling(32, 16, 32, 4, 3),) * 2)


def play(used: np.ndarray, streamed: list[int], offers: Offers) -> list[int]:
    """Which expert lands in each place, as the kernel's rules say. used: bool [experts]."""
    waiting = sorted(streamed, key=lambda e: -offers.appeal[0, e])
    landed = []
    for slot, resident, least in offers.places[0]:
        free = slot != ABSENT and (resident == ABSENT or not used[resident])
        fits = free and waiting and offers.appeal[0, waiting[0]] >= least
        landed.append(waiting.pop(0) if fits else ABSENT)
    return landed


@pytest.mark.parametrize(("tokens", "top_k", "parts"), [(1, 4, 33), (1, 4, 64), (3, 3, 50), (5, 2, 20)])
def test_the_device_lands_what_the_rules_say(tokens, top_k, parts):
    """Random scores, so that some newcomers are worth less than the worst residents."""
    random = np.random.default_rng(tokens)
    landed_in_all = refused = 0
    with decode(FMT, 14, 5, tokens, top_k, update=3) as (manager, steps):
        steps.split = Parts(parts, 14)
        for number in range(12):
            batch = random_batch(FMT, 14, tokens, top_k)
            for write in manager.tier.landed_writes(wait=True):  # else the step's begin would do so
                manager.cache.map_landed(write)
            before, scores = manager.cache.layer_map(0).copy(), random.random((1, 14))
            cache = manager.cache
            offers = choose_offers(
                scores, scores, cache.expert_in, cache.may_be_offered(), cache.being_written(), 3, 1.0
            )
            manager.next_offers, manager._offered_places = offers, 3
            check(run(steps, tokens, 0, batch), batch, manager, tokens)
            counts = np.bincount(batch[1].reshape(-1).numpy(), minlength=14)
            absent = [e for e in range(14) if counts[e] and before[e] == ABSENT]
            absent.sort(key=lambda e: (-counts[e], -offers.appeal[0, e]))
            streamed = absent[: min(parts, len(absent) * PARTS) // PARTS]
            expected = play(counts > 0, streamed, offers)
            path = steps.path
            assert path.record.device.landings[0, :, 0].tolist() == expected, number
            assert [
                int(e) for e in path._buffers.entries.expert[: len([e for e in expected if e >= 0])].cpu()
            ] == sorted(e for e in expected if e >= 0)
            for place, expert in zip(offers.places[0], expected, strict=True):
                if expert != ABSENT and not manager.cache.being_written()[0, expert]:
                    assert manager.cache.layer_map(0)[expert] == place[SLOT]
                    if DEVICE.type == "cpu":
                        slot = manager.tier.slots[0][place[SLOT]]
                        assert torch.equal(slot, manager.store.blocks(0)[expert])
            landed_in_all += sum(e != ABSENT for e in expected)
            refused += len(streamed) > 0 and ABSENT in expected
            manager.check_invariants()
    assert landed_in_all >= 4
    assert refused >= 2


def test_only_leading_choices_land():
    with decode(FMT, 10, 4, 2, 3) as (manager, steps):
        steps.path._leading = 1
        steps.split = Parts(16 * 16, 10)
        hidden, _, weights = random_batch(FMT, 10, 2, 3)
        ids = torch.tensor([[2, 7, 5], [7, 1, 8]])
        weights[:] = torch.tensor([[0.1, 0.2, 0.7], [0.4, 0.4, 0.2]])
        batch = (hidden, ids, weights)
        check(run(steps, 2, 0, batch), batch, manager, 2)
        # Everything crosses. The heaviest: 5; and 7, which comes before its equal.
        assert np.flatnonzero(manager.cache.layer_map(0) != ABSENT).tolist() == [5, 7]


def test_a_step_that_may_not_land_leaves_the_cache_alone():
    with decode(FMT, 10, 4, 1, 3) as (manager, steps):
        steps.split = Parts(16 * 16, 10)
        for land in (True, False):
            before = manager.cache.version.copy()
            steps.begin(1, land=land)
            steps.path.run(0, *(tensor.to(DEVICE) for tensor in random_batch(FMT, 10, 1, 3)))
            steps.enqueued()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            steps.finish(learn=False)
            assert (manager.cache.version != before).any() == land


def test_a_layer_that_a_step_leaves_out_lands_nothing():
    """Its mailbox still says what landed in it the time before."""
    with decode(FMT, 8, 4, 1, 3, layers=2) as (manager, steps):
        steps.split = Parts(16 * 16, 8)
        batch = random_batch(FMT, 8, 1, 3)
        check(run(steps, 1, 1, batch), batch, manager, 1, layer=1)
        landed = manager.cache.slot_of[1].copy()
        assert (landed != ABSENT).sum() == 2
        for _ in range(2):
            run(steps, 1, 0, random_batch(FMT, 8, 1, 3))
        manager.check_invariants()
        assert (manager.cache.slot_of[1] == landed)[landed != ABSENT].all()


def test_an_abandoned_step_leaves_nothing_in_offered_slots():
    with decode(FMT, 8, 4, 1, 3) as (manager, steps):
        steps.split = Parts(16 * 16, 8)
        for _ in range(3):
            run(steps, 1, 0, random_batch(FMT, 8, 1, 3))
        steps.begin(1)
        held = (manager.cache.slot_of != ABSENT).sum()
        at_stake = manager.cache.at_stake().sum()
        steps.abandon()
        manager.check_invariants()
        assert not manager.cache.at_stake().any()
        assert (manager.cache.slot_of != ABSENT).sum() == held - at_stake
        assert at_stake > 0


def test_a_step_that_cannot_begin_offers_nothing(monkeypatch):
    with decode(FMT, 8, 4, 1, 3) as (manager, steps):
        before = manager.cache.slot_of.copy()
        with monkeypatch.context() as patch:
            patch.setattr(steps.path, "begin_step", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                steps.begin(1)
        manager.check_invariants()
        assert (manager.cache.slot_of == before).all()
        assert (manager.cache.version % 2 == 0).all()
        batch = random_batch(FMT, 8, 1, 3)
        check(run(steps, 1, 0, batch), batch, manager, 1)


def test_a_step_that_cannot_begin_leaves_the_one_before_as_it_is(monkeypatch):
    with decode(FMT, 8, 4, 1, 3) as (manager, steps):
        steps.split = Parts(16 * 16, 8)
        run(steps, 1, 0, random_batch(FMT, 8, 1, 3))
        batch = random_batch(FMT, 8, 1, 3)
        steps.begin(1)
        out = steps.path.run(0, *(tensor.to(DEVICE) for tensor in batch))
        steps.enqueued()
        offered = manager.cache.at_stake().copy()
        with monkeypatch.context() as patch:
            patch.setattr(steps.path, "begin_step", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                steps.begin(1)
        manager.check_invariants()
        assert steps.num_open == 1
        assert (manager.cache.at_stake() == offered).all()
        with pytest.raises(RuntimeError, match="a step is running already"):
            manager.begin_step()
        steps.begin(1)
        with pytest.raises(RuntimeError, match=r"too many steps are open \(2\)"):
            steps.begin(1)
        later = random_batch(FMT, 8, 1, 3)
        behind = steps.path.run(0, *(tensor.to(DEVICE) for tensor in later))
        steps.enqueued()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        for result, given in ((out, batch), (behind, later)):
            steps.finish()
            check(result.cpu(), given, manager, 1)
            manager.check_invariants()
        assert steps.num_open == 0


def test_halves_wait_for_the_step_before():
    with decode(FMT, 8, 4, 1, 3) as (manager, steps):
        steps.begin(1)
        steps.path.run(0, *(tensor.to(DEVICE) for tensor in random_batch(FMT, 8, 1, 3)))
        steps.enqueued()
        with pytest.raises(RuntimeError, match=r"too many steps are open \(1\)"):
            steps.begin(1, 1)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        steps.finish()
        manager.check_invariants()


@pytest.mark.parametrize("update", [0, 1, 9])
@pytest.mark.parametrize("slots", [1, 2, 7])
def test_small_caches_and_any_limit(slots, update):
    with decode(FMT, 8, slots, 2, 3, update=update) as (manager, steps):
        steps.split = Parts(40, 8)
        for _ in range(4):
            batch = random_batch(FMT, 8, 2, 3)
            check(run(steps, 2, 0, batch), batch, manager, 2)
            manager.check_invariants()
        steps.flush()
        assert (manager.counters.total().landed > 0) == (update > 0)


def test_a_path_that_copies_fewer_experts_than_there_are_places():
    with decode(FMT, 8, 4, 1, 1, update=3) as (manager, steps):
        assert steps.path.places == 1 < manager.places
        steps.split = Parts(16, 8)
        for _ in range(6):
            batch = random_batch(FMT, 8, 1, 1)
            check(run(steps, 1, 0, batch), batch, manager, 1)
            manager.check_invariants()
        assert manager.counters.total().landed > 0


def test_a_step_of_two_halves_is_offered_nothing():
    """One half might read what the other writes."""
    with decode(FMT, 8, 4, 1, 3) as (manager, steps):
        boxes = Mailboxes(steps.path.mailboxes._engine, manager.store, 1, 3, pin_memory=DEVICE.type == "cuda")
        second = DecodePath(manager.store, manager.tier.slots, boxes, 1, 3)
        steps.use_second(second)
        try:
            steps.split = Parts(16 * 16, 8)
            for _ in range(3):
                run(steps, 1, 0, random_batch(FMT, 8, 1, 3))
            landed = manager.counters.total().landed
            assert landed > 0
            batches = [random_batch(FMT, 8, 1, 3) for _ in range(2)]
            steps.begin(1, 1)
            assert not manager.cache.at_stake().any()
            outs = [
                path.run(0, *(tensor.to(DEVICE) for tensor in batch)).cpu()
                for path, batch in zip((steps.path, second), batches, strict=True)
            ]
            steps.enqueued()
            steps.finish()
            for out, batch in zip(outs, batches, strict=True):
                check(out, batch, manager, 1)
            assert manager.counters.total().landed == landed
        finally:
            boxes.close()
