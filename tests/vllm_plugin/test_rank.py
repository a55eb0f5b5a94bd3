"""A rank's memory: refused with numbers before it is touched, and given back whatever fails. Without vLLM and a GPU."""

import re

import pytest
import torch

from greenroom import hardware
from greenroom.errors import MemoryLimitError
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.host_tier import HostTier
from greenroom.vllm_plugin import rank as rank_module
from greenroom.vllm_plugin.binding import Share
from greenroom.vllm_plugin.formats import LayerFormat
from greenroom.vllm_plugin.memory import RankPlan
from greenroom.vllm_plugin.options import MoeOffloadOptions
from greenroom.vllm_plugin.rank import RankExperts

GIB = 2**30
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SMALL = ExpertFormat(32, 32, torch.float32, Activation(ActivationKind.SILU))
LARGE = ExpertFormat(8192, 8192, torch.bfloat16, Activation(ActivationKind.SILU))  # 0.375 GiB


class Machine:
    """Stands in for a machine with a GPU: what is free, and which addresses are page-locked."""

    def __init__(self, monkeypatch):
        self.host, self.device = 100 * GIB, 100 * GIB
        self.locked = set()
        self.lockable = 1000
        monkeypatch.setattr(hardware, "available_host_bytes", lambda: self.host)
        monkeypatch.setattr(rank_module, "device_free", lambda device: self.device)
        monkeypatch.setattr(hardware, "lock_pages", self.lock)
        monkeypatch.setattr(hardware, "unlock_pages", self.locked.remove)

    def lock(self, address, size, otherwise=""):
        if len(self.locked) == self.lockable:
            raise MemoryLimitError(f"cannot page-lock; {otherwise}")
        self.locked.add(address)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def make(device, slots=0, ranks=1):
    options = MoeOffloadOptions(cache_expert_num=slots, context_num_threads=1)
    return RankExperts(options, device, Share(0, ranks, device.type == "cuda"))


def add(experts, fmt=SMALL, count=4):
    return experts.add_layer(LayerFormat(fmt, False), count, 2)


def out_of_memory(*_args, **_kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


def test_a_device_without_memory_for_slots_is_said_in_numbers_and_leaves_nothing_locked(machine, monkeypatch):
    monkeypatch.setattr(rank_module, "CudaTier", out_of_memory)
    experts = make(GPU, slots=3)
    for _ in range(2):
        add(experts)
    assert len(machine.locked) == 2
    machine.device = 5 * GIB
    with pytest.raises(
        MemoryLimitError,
        match=r"3 slots in each of 2 layers take 0\.00 GiB, .* and 5\.00 GiB were free; give a smaller "
        "--moe-offload-cache-expert-num / --moe-expert-cache-size",
    ):
        experts.finish()
    experts.close()
    assert not machine.locked
    experts.close()


def test_a_manager_that_fails_closes_the_tier_before_pages_are_unlocked(machine, monkeypatch):
    closed = []

    class Tier(HostTier):
        def __init__(self, store, num_slots, engine, miss_expert_num, device):
            super().__init__(store, num_slots, engine, miss_expert_num)

        def measure_costs(self):
            raise torch.OutOfMemoryError("CUDA out of memory")

        def close(self):
            closed.append(len(machine.locked))
            super().close()

    monkeypatch.setattr(rank_module, "CudaTier", Tier)
    experts = make(GPU, slots=3)
    add(experts)
    with pytest.raises(MemoryLimitError):
        experts.finish()
    experts.close()
    assert closed == [1]
    assert not machine.locked


def test_buffers_of_the_steps_that_do_not_fit_are_said_in_the_same_way(machine):
    experts = make(GPU)
    add(experts)
    machine.device = 2 * GIB
    with pytest.raises(MemoryLimitError, match=r"2\.00 GiB were free; free GPU memory") as caught, experts.allocating():
        out_of_memory()
    assert "cache-expert-num" not in str(caught.value), "there are no slots to have fewer of"
    experts.close()


def test_free_memory_is_that_before_slots_were_allocated(machine, monkeypatch):
    def tier(store, slots, engine, group, device):
        machine.device = 1 * GIB
        return HostTier(store, slots, engine, group)

    monkeypatch.setattr(rank_module, "CudaTier", tier)
    experts = make(GPU, slots=3)
    add(experts)
    machine.device = 7 * GIB
    experts.finish()
    with pytest.raises(MemoryLimitError, match=r"7\.00 GiB were free"), experts.allocating():
        out_of_memory()
    experts.close()


@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_layer_that_does_not_fit_into_host_memory_is_refused_before_it_is_allocated(machine, monkeypatch, device):
    machine.host = int(1.8 * GIB)
    experts = make(device)
    add(experts, LARGE, 2)  # 0.75 GiB
    add(experts, LARGE, 2)
    monkeypatch.setattr(rank_module, "HostStore", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(
        MemoryLimitError,
        match=r"layer 3 of experts needs 0\.75 GiB and those before it 1\.50 GiB; 1\.80 GiB were available at first, "
        r"1\.80 GiB are now; free memory",
    ):
        add(experts, LARGE, 2)
    assert len(experts.plan.formats) == 2
    experts.close()
    assert not machine.locked


def test_memory_that_others_took_since_is_not_there(machine):
    experts = make(CPU)
    add(experts, LARGE, 2)
    machine.host = GIB // 2
    with pytest.raises(MemoryLimitError, match=r"100\.00 GiB were available at first, 0\.50 GiB are now"):
        add(experts, LARGE, 2)
    experts.close()


def test_ranks_of_a_machine_share_its_memory(machine):
    machine.host = 2 * GIB
    alone, two = make(CPU), make(CPU, ranks=2)
    for experts in (alone, two):
        add(experts, LARGE, 2)
    add(alone, LARGE, 2)
    with pytest.raises(MemoryLimitError, match="on each of 2 ranks"):
        add(two, LARGE, 2)
    alone.close()
    two.close()


def test_without_a_gpu_slots_are_host_memory(machine):
    machine.host = int(1.2 * GIB)
    without, with_slots = make(CPU), make(CPU, slots=2)
    add(without, LARGE, 2)
    with pytest.raises(MemoryLimitError, match=r"needs 1\.50 GiB .* give a smaller --moe-offload-cache-expert-num"):
        add(with_slots, LARGE, 2)
    without.close()
    with_slots.close()


def test_slots_that_cannot_fit_are_refused_while_the_model_is_made(machine):
    machine.device = GIB
    experts = make(GPU, slots=2)
    add(experts, LARGE, 2)
    with pytest.raises(MemoryLimitError, match=r"2 slots in each of 2 layers take 1\.50 GiB.* 1\.00 GiB were free"):
        add(experts, LARGE, 2)
    experts.close()
    assert not machine.locked


def test_a_layer_has_no_more_slots_than_experts():
    plan = RankPlan(3, on_gpu=True, ranks=1).with_layer(SMALL, 2).with_layer(SMALL, 8)
    assert plan.slots == [2, 3]
    assert plan.slot_bytes == [2 * SMALL.block_bytes, 3 * SMALL.block_bytes]
    assert plan.host_bytes == [2 * SMALL.block_bytes, 8 * SMALL.block_bytes]
    assert plan.explain_slots_misfit(5 * SMALL.block_bytes) is None
    assert plan.explain_slots_misfit(5 * SMALL.block_bytes - 1) is not None
    assert plan.explain_host_misfit(10 * SMALL.block_bytes, 8 * SMALL.block_bytes) is None
    assert plan.explain_host_misfit(10 * SMALL.block_bytes - 1, 8 * SMALL.block_bytes) is not None
    assert plan.explain_host_misfit(10 * SMALL.block_bytes, 8 * SMALL.block_bytes - 1) is not None


def test_pages_that_cannot_be_locked_are_no_matter_of_an_option_that_the_plugin_does_not_have(machine):
    machine.lockable = 1
    experts = make(GPU)
    add(experts)
    with pytest.raises(MemoryLimitError, match="run without --moe-offload"):
        add(experts)
    experts.close()
    assert not machine.locked


class RefusingDriver:
    def cuMemHostRegister_v2(self, *_args):
        return 2


def test_the_sentence_of_locking_is_the_callers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(hardware, "cuda_driver", RefusingDriver)
    with pytest.raises(MemoryLimitError, match=re.escape("or give pin_memory=False (--no-pin-memory)")):
        hardware.lock_pages(0, 4096)
    with pytest.raises(MemoryLimitError, match="memlock=-1', or do something else") as caught:
        hardware.lock_pages(0, 4096, otherwise="do something else")
    assert "pin_memory" not in str(caught.value)


@pytest.mark.cuda
def test_a_gpu_that_is_full_when_slots_are_allocated(monkeypatch):
    locked, lock, unlock = set(), hardware.lock_pages, hardware.unlock_pages
    monkeypatch.setattr(hardware, "lock_pages", lambda at, size, otherwise: (lock(at, size, otherwise), locked.add(at)))
    monkeypatch.setattr(hardware, "unlock_pages", lambda at: (unlock(at), locked.remove(at)))
    experts = make(GPU, slots=2)
    for _ in range(2):
        add(experts, LARGE, 2)
    assert len(locked) == 2
    others = torch.empty(rank_module.device_free(GPU) - GIB // 2, dtype=torch.uint8, device=GPU)
    with pytest.raises(MemoryLimitError, match=r"2 slots in each of 2 layers take 1\.50 GiB.*0\.\d+ GiB were free"):
        experts.finish()
    experts.close()
    assert not locked
    del others
    torch.cuda.empty_cache()
    torch.zeros(4, device=GPU).sum().item()  # the failure left no error behind
