"""The rates that the split between copies and CPU starts from."""

import torch

from greenroom.experts.cpu import CpuExperts
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.host_tier import HostTier
from greenroom.experts.native import Isa
from greenroom.experts.probe import cpu_rates
from greenroom.experts.store import HostStore

FMT = ExpertFormat(512, 256, torch.bfloat16, Activation(ActivationKind.SILU))


def test_rates_are_those_of_a_computer():
    with HostStore([FMT] * 3, [4] * 3) as store, CpuExperts(1, None, Isa.AUTO) as engine:
        reading, computing = cpu_rates(engine, store)
    assert 1e7 < reading < 1e12
    assert 1e8 < computing < 1e14
    assert computing > reading, "a weight that is read is used at least twice"


def test_without_a_gpu_nothing_is_streamed():
    with HostStore([FMT], [4]) as store, CpuExperts(1, None, Isa.AUTO) as engine:
        tier = HostTier(store, [0], engine, 2)
        assert tier.measure_costs().copy_bytes_per_s == 0
