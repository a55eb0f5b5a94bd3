"""Faults in what is offered to a step for experts to land in; tests have to notice them."""

import numpy as np
import pytest

from greenroom.experts.cache import ExpertCache

Patch = pytest.MonkeyPatch


def a_copy_writes_what_is_offered(patch: Patch) -> None:
    """Residents of offered slots may be replaced by copies while the step runs."""
    patch.setattr(ExpertCache, "at_stake", lambda self: np.zeros(self.slot_of.shape, dtype=bool))


def the_running_steps_slots_stay_on_offer(patch: Patch) -> None:
    """What lands in them is not known when the next step's are chosen."""
    real = ExpertCache.may_be_offered

    def mutant(self):
        may = real(self)
        for offer in self._offered:
            may[offer.slots.layer, offer.slots.slot] = True
        return may

    patch.setattr(ExpertCache, "may_be_offered", mutant)
