"""A long prefill leaves the decode set in its slots."""

import numpy as np
import pytest

from greenroom.experts.residency import ABSENT
from tests.experts.driver import ALL_STREAMED, BOTH_LANES, Driver


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfru"])
@pytest.mark.parametrize("costs", [ALL_STREAMED, BOTH_LANES])
def test_a_prefill_replaces_at_most_the_limit(policy, costs):
    driver = Driver(experts=16, slots=6, layers=2, policy=policy, limit=2, costs=costs)
    for _ in range(40):
        driver.step(tokens=1, top_k=3)
        driver.finish_writes(100)
    driver.step(tokens=1, top_k=3)
    before = driver.manager.cache.slot_of.copy()
    assert ((before != ABSENT).sum(axis=1) >= 6 - 2).all()
    driver.step(tokens=300, top_k=3, skew=False)
    after = driver.manager.cache.slot_of
    for layer in range(2):
        left = np.flatnonzero((before[layer] != ABSENT) & (after[layer] != before[layer]))
        assert len(left) <= 2
