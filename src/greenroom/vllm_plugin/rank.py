"""RankExperts: all routed experts that one worker process is responsible for."""

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from greenroom import hardware
from greenroom.errors import ConfigError, MemoryLimitError
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.cuda_tier import CudaTier
from greenroom.experts.host_tier import HostTier
from greenroom.experts.manager import OffloadManager
from greenroom.experts.native import Isa
from greenroom.experts.policies import make_policy
from greenroom.experts.sizing import miss_expert_num
from greenroom.experts.store import HostStore
from greenroom.experts.tier import DeviceTier
from greenroom.vllm_plugin.binding import Share, rank_cores, rank_homes
from greenroom.vllm_plugin.formats import LayerFormat
from greenroom.vllm_plugin.memory import RankPlan, device_free
from greenroom.vllm_plugin.options import MoeOffloadOptions

_building: ContextVar["RankExperts | None"] = ContextVar("greenroom_building", default=None)


def rank_being_built() -> "RankExperts | None":
    """The rank whose model is being made in this thread; None for models without offloading."""
    return _building.get()


@dataclass
class RankExperts:
    """Filled layer by layer while vLLM makes and loads the model; then ``finish`` makes it ready to run.

    Attributes:
        dummy: vLLM was told to make weights up instead of loading them.
        top_k: choices a token; the same in all layers.
        device_bytes: of GPU memory that offloading took, by torch's count. The worker writes it.
        manager, engine: there after ``finish``.
        plan: the layers so far.
        cores: to which the engine's threads are pinned; None if they are not.
        load_seconds: that the model took to be made and loaded.
    """

    options: MoeOffloadOptions
    device: torch.device
    share: Share
    dummy: bool = False
    top_k: int = 0
    device_bytes: int = 0
    manager: OffloadManager | None = None
    engine: CpuExperts | None = None
    cores: list[int] | None = None
    load_seconds: float = 0.0
    _stores: list[HostStore] = field(default_factory=list)
    _tier: DeviceTier | None = None
    _device_before: int | None = None

    def __post_init__(self) -> None:
        self.plan = RankPlan(self.options.cache_expert_num, self._on_gpu, self.share.count)
        self._homes = rank_homes(self.share)
        self._host_before = hardware.available_host_bytes()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Layers made inside the block register here."""
        token = _building.set(self)
        started = time.perf_counter()
        try:
            yield
        finally:
            _building.reset(token)
            self.load_seconds += time.perf_counter() - started

    def add_layer(self, layer: LayerFormat, num_experts: int, top_k: int) -> tuple[int, HostStore]:
        """Allocates (beside a GPU, page-locks) a layer's blocks.

        Returns:
            The layer's number, and a store with this layer only.

        Raises:
            ConfigError: the layers differ in what has to be the same.
            MemoryLimitError: host memory, or a GPU's memory for the slots, does not suffice.
        """
        if self._stores and top_k != self.top_k:
            raise ConfigError(
                f"--moe-offload needs the same number of experts a token in all layers, not {self.top_k} and {top_k}"
            )
        self.top_k = top_k
        plan = self.plan.with_layer(layer.format, num_experts)
        self._check_memory(plan)
        lock = self._on_gpu
        store = HostStore(
            [layer.format],
            [num_experts],
            lock_pages=functools.partial(hardware.lock_pages, otherwise="run without --moe-offload") if lock else None,
            unlock_pages=hardware.unlock_pages if lock else None,
            homes=self._homes,
        )
        self._stores.append(store)
        self.plan = plan
        return len(self._stores) - 1, store

    def _check_memory(self, plan: RankPlan) -> None:
        """Refuses a plan whose last layer does not fit, before memory of that layer is touched."""
        problem = plan.explain_host_misfit(self._host_before, hardware.available_host_bytes())
        if problem is None and self._on_gpu:
            problem = plan.explain_slots_misfit(device_free(self.device))
        if problem is not None:
            raise MemoryLimitError(problem)

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def finish(self) -> OffloadManager:
        """Makes threads, slots and buffers. All of the device's memory that offloading needs is allocated here.

        Raises:
            ConfigError: the model has no layer that offloading could take.
            MemoryLimitError: the device's memory does not suffice.
        """
        if not self._stores:
            raise ConfigError("--moe-offload found no routed experts in this model; remove it")
        threads, self.cores = rank_cores(self.options.context_num_threads, self.share)
        self.engine = CpuExperts(
            threads, self.cores, Isa.AUTO, batch_invariant=not self._on_gpu, callers_help=not self._on_gpu
        )
        store = HostStore.joined(self._stores)
        self._stores = [store]  # at once: whatever fails from here on, ``close`` unlocks it
        config, slots = self.options.to_config(), self.plan.slots
        group_size = miss_expert_num(config, store.num_experts)
        topk = config.cache_topk or max(store.num_experts)
        with self.allocating():
            if self._on_gpu:
                self._tier = CudaTier(store, slots, self.engine, group_size, self.device)
            else:
                self._tier = HostTier(store, slots, self.engine, group_size)
            self.manager = OffloadManager(
                store, self._tier, slots, make_policy(config.policy), topk, config.update_expert_num
            )
        return self.manager

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Says in numbers of slots and bytes if the GPU's memory does not suffice inside the block.

        Raises:
            MemoryLimitError: in place of torch's error.
        """
        if self._device_before is None:
            self._device_before = device_free(self.device) if self._on_gpu else 0
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise MemoryLimitError(self.plan.explain_out_of_memory(self._device_before)) from error

    def close(self) -> None:
        """Frees memory, then ends the threads. Idempotent."""
        if self.manager is not None:
            self.manager.close()
        elif self._tier is not None:
            # Its copies may still read what is unlocked below.
            self._tier.close()
        if self.engine is not None:
            self.engine.close()
        for store in self._stores:
            store.close()
        self._stores = []
