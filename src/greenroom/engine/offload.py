"""Offload: what stands behind a model whose experts wait in host memory, from building to closing."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import PreTrainedModel

from greenroom import hardware, numa
from greenroom.config import OffloadConfig
from greenroom.engine.attach import attach_manager, detach
from greenroom.engine.cache_argument import why_no_plain_cache
from greenroom.engine.held_memory import DeviceMemory, HeldMemory
from greenroom.engine.request import Request
from greenroom.engine.single import take_single_passes
from greenroom.engine.spec import ModelSpec
from greenroom.errors import ConfigError
from greenroom.experts.counters import OffloadStats
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.cuda_tier import CudaTier
from greenroom.experts.host_tier import HostTier
from greenroom.experts.manager import OffloadManager
from greenroom.experts.sizing import MemoryPlan, miss_expert_num
from greenroom.experts.store import HostStore
from greenroom.experts.tier import DeviceTier
from greenroom.weights.base import NoWeightOffload, WeightOffloader

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_greenroom"

_UNPLANNED_BYTES = 128 << 20
"""That a model may hold beside what was planned: workspaces of libraries, maps, what torch rounds up."""


class Companion(Protocol):
    """What uses a model's memory and threads, so that it has to be closed before them."""

    def close(self) -> None:
        """Idempotent."""


@dataclass(frozen=True)
class Offload:
    """Everything behind one model.

    before: the device's memory when loading began; None without a GPU. companions: closed with it, before it.
    """

    spec: ModelSpec
    config: OffloadConfig
    plan: MemoryPlan
    engine: CpuExperts
    manager: OffloadManager
    device: torch.device
    load_seconds: float
    weights: WeightOffloader
    before: DeviceMemory | None
    companions: list[Companion] = field(default_factory=list)

    def stats(self) -> OffloadStats:
        """What is active and what it has done."""
        return OffloadStats(
            policy=self.config.policy,
            device=str(self.device),
            isa=self.engine.isa.label,
            threads=self.engine.threads,
            cache_expert_num=max(self.plan.num_slots),
            host_bytes=self.manager.store.nbytes,
            device_bytes=self.manager.tier.device_bytes,
            page_locked=self.manager.store.locked,
            load_seconds=self.load_seconds,
            costs=self.manager.costs,
            layers=self.manager.counters.layers(),
            total=self.manager.counters.total(),
            weights_offload=self.weights.selection.backend,
            weights_host_bytes=self.weights.selection.host_bytes,
            weights_device_bytes=self.weights.selection.device_bytes,
        )

    def memory(self, model: PreTrainedModel) -> HeldMemory:
        """What ``model``, whose offload this is, holds with all that has been opened on it."""
        plan, now = self.plan, DeviceMemory.read(self.device)
        host = self.manager.store.nbytes + self.weights.selection.host_bytes
        if self.before is None or now is None:
            own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors_of(model)}
            host += sum(own.values()) + self.manager.tier.device_bytes
            # What is kept for KV cache and activations is filled as requests come.
            return HeldMemory(None, None, host, plan.host_bytes - plan.reserved_bytes)
        return HeldMemory(now.taken_since(self.before), plan.device_bytes + plan.reserved_bytes, host, plan.host_bytes)

    def close(self) -> None:
        """Frees memory, then ends the threads. Idempotent."""
        for companion in self.companions:
            companion.close()
        self.manager.close()
        self.weights.close()
        self.engine.close()


def offload_experts(
    model: PreTrainedModel,
    request: Request,
    spec: ModelSpec,
    plan: MemoryPlan,
    fill: Callable[[HostStore], None],
    started: float,
    weights: WeightOffloader | None = None,
) -> Offload:
    """Builds store, engine, tier and manager, and attaches them to a model without experts.

    Args:
        model: on ``request.device``, its experts replaced by ``RoutedExperts``.
        fill: writes all experts into the store.
        started: ``time.perf_counter()`` when loading began.
        weights: what ``Request.take_weights`` returned; closed with the model.

    Raises:
        GreenroomError: from ``fill`` or from allocation; nothing stays allocated but ``weights``.
    """
    config, device = request.config, request.device
    on_gpu = device.type == "cuda"
    threads, cores = hardware.engine_cores(config.context_num_threads, beside_gpu=on_gpu)
    # Beside a GPU a batch decides anyway which experts the GPU computes, in another order.
    engine = CpuExperts(threads, cores, request.isa, batch_invariant=not on_gpu, callers_help=not on_gpu)
    try:
        store = _make_store(config, spec, device)
        try:
            fill(store)
            manager = _make_manager(request, plan, store, engine)
        except BaseException:
            store.close()
            raise
    except BaseException:
        engine.close()
        raise
    attach_manager(model, spec.layers, manager)
    model.eval()
    if on_gpu:
        # Needs triton, which GPU builds of torch bring.
        from greenroom.engine.fused_projections import fuse_projections
        from greenroom.engine.fused_rope import fuse_rope
        from greenroom.engine.fused_router import fuse_routers
        from greenroom.engine.fusion import fuse_norms, use_decode_attention

        fuse_norms(model)
        fuse_rope(model)
        fuse_routers(model)
        if (weights is None or isinstance(weights, NoWeightOffload)) and fuse_projections(model):
            torch.cuda.empty_cache()  # where the weights were, which torch would keep
        # Models with other caches ask for sdpa by its name in places.
        if why_no_plain_cache(model) is None:
            use_decode_attention(model)
    else:
        take_single_passes(model, engine)
    weights = weights or NoWeightOffload()
    weights.attach(model, model.get_submodule(spec.decoder))  # behind whatever tries modules out by themselves
    seconds = time.perf_counter() - started
    offload = Offload(spec, config, plan, engine, manager, device, seconds, weights, request.before)
    setattr(model, _ATTRIBUTE, offload)
    _compare_with_plan(offload)
    return offload


def offload_of(model: PreTrainedModel) -> Offload:
    """What stands behind ``model``.

    Raises:
        ConfigError: the model did not come from ``load``.
    """
    offload = getattr(model, _ATTRIBUTE, None)
    if not isinstance(offload, Offload):
        raise ConfigError(f"this {type(model).__name__} was not loaded by greenroom.load")
    return offload


def stats(model: PreTrainedModel) -> OffloadStats:
    """Counters and settings of a model that ``load`` returned."""
    return offload_of(model).stats()


def reset_stats(model: PreTrainedModel) -> None:
    """Sets every counter to 0; what is cached stays."""
    offload_of(model).manager.counters.reset()


def close(model: PreTrainedModel) -> None:
    """Ends the threads and frees the memory behind a model, which cannot run afterwards. Idempotent."""
    offload = offload_of(model)
    detach(model, offload.spec.layers)
    offload.close()


def _make_store(config: OffloadConfig, spec: ModelSpec, device: torch.device) -> HostStore:
    lock, unlock = hardware.page_locks(device.type == "cuda" and config.pin_memory)
    return HostStore(
        [layer.format for layer in spec.layers],
        [layer.num_experts for layer in spec.layers],
        lock_pages=lock,
        unlock_pages=unlock,
        homes=numa.engine_homes(),
    )


def _make_manager(request: Request, plan: MemoryPlan, store: HostStore, engine: CpuExperts) -> OffloadManager:
    config, slots = request.config, list(plan.num_slots)
    group_size = miss_expert_num(config, store.num_experts)
    tier: DeviceTier
    if request.device.type == "cuda":
        tier = CudaTier(store, slots, engine, group_size, request.device)
    else:
        tier = HostTier(store, slots, engine, group_size)
    cache_topk = config.cache_topk or max(store.num_experts)
    return OffloadManager(store, tier, slots, request.policy, cache_topk, config.update_expert_num)


def _compare_with_plan(offload: Offload) -> None:
    """Says so where memory differs from what was computed before loading."""
    if offload.before is None:
        return
    used = torch.cuda.memory_allocated(offload.device) - offload.before.allocated
    planned = offload.plan.device_bytes
    if abs(used - planned) > max(0.05 * planned, _UNPLANNED_BYTES):
        logger.warning("the model holds %.2f GiB of device memory, %.2f were planned", used / 2**30, planned / 2**30)


def _tensors_of(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
