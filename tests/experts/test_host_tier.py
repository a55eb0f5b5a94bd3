"""The tier of a machine without a GPU, on a real engine."""

import pytest
import torch

from greenroom.errors import EngineError
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.host_tier import HostTier
from greenroom.experts.manager import OffloadManager
from greenroom.experts.policies import make_policy
from greenroom.experts.store import HostStore
from tests.experts.driver import ALL_ON_CPU
from tests.experts.stage import AGES, EXPERTS, SMALL, filled
from tests.reference.expert_math import moe_float64

LAYERS, TOKENS, TOP_K = 2, 3, 2


def test_a_step_whose_cpu_hangs_fails_and_names_the_layer() -> None:
    store = filled(HostStore([SMALL] * LAYERS, [EXPERTS] * LAYERS))
    with CpuExperts(2, watchdog_s=0.1) as engine:
        tier = HostTier(store, [2] * LAYERS, engine, 2)
        with OffloadManager(store, tier, [2] * LAYERS, make_policy("lfru"), TOP_K, 2, ALL_ON_CPU) as manager:

            def run(layer: int) -> None:
                hidden = torch.randn(TOKENS, SMALL.hidden).to(SMALL.dtype)
                ids, weights = torch.randint(0, EXPERTS, (TOKENS, TOP_K), dtype=torch.int32), torch.rand(TOKENS, TOP_K)
                out = manager.layers[layer].forward(hidden, ids, weights)
                expected = moe_float64(hidden, ids, weights, store.views(layer), SMALL)
                torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)

            def step(hangs_at: int | None = None) -> None:
                with manager.step():
                    for layer in range(LAYERS):
                        if layer == hangs_at:
                            engine.throttle(AGES)
                        run(layer)

            for hangs_at in (1, 0):
                for _ in range(3):
                    step()
                with pytest.raises(EngineError, match=f"layer {hangs_at}: the CPU engine has not got on"):
                    step(hangs_at)
                engine.throttle(1)
                manager.check_invariants()
            for _ in range(3):
                step()
