"""Breaks the core on purpose: the battery of ``driver`` must notice every one of these faults."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from greenroom.experts import admission as admission_module
from greenroom.experts import dispatch as dispatch_module
from greenroom.experts import layer as layer_module
from greenroom.experts.admission import Admission
from greenroom.experts.cache import ExpertCache, SlotWrite
from greenroom.experts.dispatch import Dispatch
from greenroom.experts.host_tier import HostTier
from greenroom.experts.manager import OffloadManager
from greenroom.experts.residency import ABSENT
from greenroom.experts.usage import ExpertUsage
from tests.experts.driver import ALL_ON_CPU, ALL_STREAMED, BOTH_LANES, Driver

Patch = pytest.MonkeyPatch


def victims_in_use(patch: Patch) -> None:
    real = admission_module.choose_swaps
    patch.setattr(
        admission_module,
        "choose_swaps",
        lambda scores, slots, free, needed, *rest: real(scores, slots, free, np.zeros_like(needed), *rest),
    )


def no_limit_on_replacements(patch: Patch) -> None:
    real = admission_module.choose_swaps
    patch.setattr(admission_module, "choose_swaps", lambda *args: real(*args[:-2], args[-2] + 1, args[-1]))


def victim_stays_in_the_map(patch: Patch) -> None:
    real = ExpertCache.unmap_and_write

    def mutant(self, layer, swap):
        slot = self.slot_of[layer, swap.victim] if swap.victim != ABSENT else ABSENT
        write = real(self, layer, swap)
        if swap.victim != ABSENT:
            self.slot_of[layer, swap.victim] = slot
        return write

    patch.setattr(ExpertCache, "unmap_and_write", mutant)


def newcomer_is_mapped_before_its_bytes(patch: Patch) -> None:
    real = OffloadManager._start

    def mutant(self, layer, swap):
        real(self, layer, swap)
        self.cache.map_landed(SlotWrite(layer, swap.slot, swap.expert))

    patch.setattr(OffloadManager, "_start", mutant)


def version_is_not_counted(patch: Patch) -> None:
    real = ExpertCache.map_landed

    def mutant(self, write):
        before = self.version.copy()
        real(self, write)
        self.version[:] = before

    patch.setattr(ExpertCache, "map_landed", mutant)


def a_mapped_slot_is_written(patch: Patch) -> None:
    real = HostTier.run

    def mutant(self, batch, ids, plan, slot_of):
        out = real(self, batch, ids, plan, slot_of)
        for slot in slot_of[slot_of != ABSENT][:1]:
            self._slots[batch.layer][slot].fill_(0)
        return out

    patch.setattr(HostTier, "run", mutant)


def last_streamed_expert_is_dropped(patch: Patch) -> None:
    real = dispatch_module.dispatch

    def mutant(*args):
        plan = real(*args)
        groups = tuple(group[:-1] for group in plan.streamed)
        return Dispatch(plan.counts, plan.resident, groups, plan.cpu)

    patch.setattr(layer_module, "dispatch", mutant)


def groups_overwrite_instead_of_adding(patch: Patch) -> None:
    patch.setattr(torch.Tensor, "__iadd__", lambda self, other: self.copy_(other))


def wrong_slot(patch: Patch) -> None:
    real = HostTier.run

    def mutant(self, batch, ids, plan, slot_of):
        wrong = np.where(slot_of == ABSENT, slot_of, (slot_of + 1) % len(self._slots[batch.layer]))
        return real(self, batch, ids, plan, wrong)

    patch.setattr(HostTier, "run", mutant)


def padding_is_counted(patch: Patch) -> None:
    real = OffloadManager.begin_step
    patch.setattr(OffloadManager, "begin_step", lambda self, valid_rows=None: real(self, None))


def every_choice_admits(patch: Patch) -> None:
    real = Admission.__init__

    def mutant(self, num_experts, policy, cache_topk, update_expert_num):
        real(self, num_experts, policy, 99, update_expert_num)

    patch.setattr(Admission, "__init__", mutant)


def the_clock_stands_still(patch: Patch) -> None:
    patch.setattr(ExpertUsage, "advance", lambda self: None)


def admitted_twice(patch: Patch) -> None:
    patch.setattr(ExpertCache, "being_written", lambda self: np.zeros_like(self._arriving))


MUTANTS: list[Callable[[Patch], None]] = [
    victims_in_use,
    no_limit_on_replacements,
    victim_stays_in_the_map,
    newcomer_is_mapped_before_its_bytes,
    version_is_not_counted,
    a_mapped_slot_is_written,
    last_streamed_expert_is_dropped,
    groups_overwrite_instead_of_adding,
    wrong_slot,
    padding_is_counted,
    every_choice_admits,
    the_clock_stands_still,
    admitted_twice,
]


def exercise() -> None:
    """Enough steps, of every kind, to bring out any of the faults."""
    for policy in ("lru", "lfru"):
        for costs in (ALL_ON_CPU, ALL_STREAMED, BOTH_LANES):
            driver = Driver(8, 3, policy=policy, costs=costs, group=2, limit=1)
            for number in range(25):
                driver.step(2 if number % 5 else 8, 3, padding=1 if number % 2 else 0)
                driver.finish_writes(number % 3)


def test_the_core_as_it_is_passes():
    exercise()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_battery_notices(mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        exercise()
