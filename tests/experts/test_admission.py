"""All layers' routing at once teaches what it teaches layer by layer."""

import numpy as np
import pytest

from greenroom.experts.admission import Admission
from greenroom.experts.policies import make_policy


@pytest.mark.parametrize("cache_topk", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_all_layers_at_once(cache_topk, tokens):
    random = np.random.default_rng(cache_topk)
    experts = [7, 5]
    at_once, one_by_one = (Admission(experts, make_policy("lfru"), cache_topk, 2) for _ in range(2))
    for _ in range(4):
        ids = np.stack([[random.permutation(count)[:3] for _ in range(tokens)] for count in experts]).astype(np.int32)
        ids = ids.reshape(len(experts), tokens, 3)
        ids[random.random(ids.shape) < 0.2] = -1
        weights = random.random(ids.shape)
        at_once.record_all(ids, weights)
        for layer, count in enumerate(experts):
            counts = np.bincount(ids[layer][ids[layer] >= 0], minlength=count)
            one_by_one.record(layer, ids[layer], weights[layer], counts, None)
        for name in ("_needed", "_admissible"):
            assert (getattr(at_once, name) == getattr(one_by_one, name)).all(), name
        for name in ("frequency", "total", "last_used"):
            assert (getattr(at_once.usage, name) == getattr(one_by_one.usage, name)).all(), name
        assert cache_topk > 2 or tokens < 5 or (at_once._needed != at_once._admissible).any()
        for admission in (at_once, one_by_one):
            admission.usage.advance()
            admission.forget_step()
