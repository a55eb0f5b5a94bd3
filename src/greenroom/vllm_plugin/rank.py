"""RankExperts: all routed experts that one worker process is responsible for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from greenroom import hardware
from greenroom.errors import ConfigError
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.cuda_tier import CudaTier
from greenroom.experts.host_tier import HostTier
from greenroom.experts.manager import OffloadManager
from greenroom.experts.native import Isa
from greenroom.experts.policies import make_policy
from greenroom.experts.sizing import miss_expert_num
from greenroom.experts.store import HostStore
from greenroom.experts.tier import DeviceTier
from greenroom.vllm_plugin.binding import Share, rank_cores
from greenroom.vllm_plugin.formats import LayerFormat
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
    """

    options: MoeOffloadOptions
    device: torch.device
    share: Share
    dummy: bool = False
    top_k: int = 0
    device_bytes: int = 0
    manager: OffloadManager | None = None
    engine: CpuExperts | None = None
    load_seconds: float = 0.0
    _stores: list[HostStore] = field(default_factory=list)

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
            MemoryLimitError: there is no such memory.
        """
        if self._stores and top_k != self.top_k:
            raise ConfigError(
                f"--moe-offload needs the same number of experts a token in all layers, not {self.top_k} and {top_k}"
            )
        self.top_k = top_k
        lock = self.device.type == "cuda"
        store = HostStore(
            [layer.format],
            [num_experts],
            lock_pages=hardware.lock_pages if lock else None,
            unlock_pages=hardware.unlock_pages if lock else None,
        )
        self._stores.append(store)
        return len(self._stores) - 1, store

    def finish(self) -> OffloadManager:
        """Makes threads, slots and buffers. All of the device's memory that offloading needs is allocated here.

        Raises:
            ConfigError: the model has no layer that offloading could take.
        """
        if not self._stores:
            raise ConfigError("--moe-offload found no routed experts in this model; remove it")
        threads, cores = rank_cores(self.options.context_num_threads, self.share)
        self.engine = CpuExperts(threads, cores, Isa.AUTO)
        store = HostStore.joined(self._stores)
        config = self.options.to_config()
        slots = [min(self.options.cache_expert_num, count) for count in store.num_experts]
        group_size = miss_expert_num(config, store.num_experts)
        tier: DeviceTier
        if self.device.type == "cuda":
            tier = CudaTier(store, slots, self.engine, group_size, self.device)
        else:
            tier = HostTier(store, slots, self.engine, group_size)
        topk = config.cache_topk or max(store.num_experts)
        self.manager = OffloadManager(store, tier, slots, make_policy(config.policy), topk, config.update_expert_num)
        return self.manager

    def close(self) -> None:
        """Frees memory, then ends the threads. Idempotent."""
        if self.manager is not None:
            self.manager.close()
        if self.engine is not None:
            self.engine.close()
        for store in self._stores:
            store.close()
        self._stores = []
