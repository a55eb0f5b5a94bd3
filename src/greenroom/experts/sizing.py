"""What the device and the host will hold, computed before anything is allocated. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from greenroom.config import OffloadConfig
from greenroom.errors import MemoryLimitError
from greenroom.experts.formats import ExpertFormat
from greenroom.experts.transfer import NUM_BUFFERS

RESERVED_SHARE = 0.15
"""Of the device's free memory, kept for KV cache and activations when no size is given."""

RESERVED_BYTES = 1 << 30
"""At least so much is kept."""

GIB = 2**30

_FETCH_BYTES = 512 << 20
"""Of a decode path's fetch buffer at most, unless one expert is larger. Experts beyond it are read where they lie,
slower."""

_MOST_FETCH_SLOTS = 32


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by place.

    Attributes:
        num_slots: cache slots of each layer.
        host_bytes: the store, other weights that are offloaded, and on a machine without a GPU all weights.
        cache_bytes: cache slots on the device.
        buffer_bytes: the miss buffers on the device.
        other_bytes: weights that are not experts, on the device, and buffers for those that are offloaded.
        reserved_bytes: that KV cache and activations are known to need, where the weights are.
        kv_offload_bytes: of host memory for KV blocks; not part of ``host_bytes``.
    """

    num_slots: tuple[int, ...]
    host_bytes: int
    cache_bytes: int
    buffer_bytes: int
    other_bytes: int
    reserved_bytes: int
    kv_offload_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """All that the device holds before the first token."""
        return self.cache_bytes + self.buffer_bytes + self.other_bytes


def plan_memory(
    config: OffloadConfig,
    formats: list[ExpertFormat],
    num_experts: list[int],
    other_bytes: int,
    device_free: int | None,
    host_free: int,
    offloaded_bytes: int = 0,
    reserved_bytes: int = 0,
    kv_offload_bytes: int = 0,
) -> MemoryPlan:
    """Decides the number of cache slots and checks that everything fits.

    Args:
        formats, num_experts: one entry a layer.
        other_bytes: of weights that are not experts.
        device_free: bytes free on the GPU; None on a machine without one.
        host_free: bytes of host memory that can be allocated.
        offloaded_bytes: of weights that are not experts but stay in host memory, not part of ``other_bytes``.
        reserved_bytes: that KV cache and activations are known to need, on the host without a GPU. Where nobody said
            how many slots there shall be, a share of the device's memory is kept at least.
        kv_offload_bytes: of host memory, for KV blocks.

    Raises:
        MemoryLimitError: it does not fit; says what is needed and what there is.
    """
    plan = lay_out(
        config, formats, num_experts, other_bytes, device_free, offloaded_bytes, reserved_bytes, kv_offload_bytes
    )
    problem = explain_misfit(plan, device_free, host_free)
    if problem is not None:
        raise MemoryLimitError(problem)
    return plan


def lay_out(
    config: OffloadConfig,
    formats: list[ExpertFormat],
    num_experts: list[int],
    other_bytes: int,
    device_free: int | None,
    offloaded_bytes: int = 0,
    reserved_bytes: int = 0,
    kv_offload_bytes: int = 0,
) -> MemoryPlan:
    """What ``plan_memory`` returns, whether it fits or not.

    Raises:
        MemoryLimitError: ``vram`` does not even hold the miss buffers.
    """
    buffer_bytes = miss_buffer_bytes(config, formats, num_experts)
    wanted = _slots_wanted(config, formats, other_bytes, reserved_bytes, buffer_bytes, device_free)
    num_slots = tuple(min(wanted, count) for count in num_experts)
    cache_bytes = sum(n * fmt.block_bytes for n, fmt in zip(num_slots, formats, strict=True))
    store_bytes = sum(n * fmt.block_bytes for n, fmt in zip(num_experts, formats, strict=True))
    on_host = device_free is None
    # Without a GPU nothing is ever streamed, and memory that is never written is never backed by pages.
    return MemoryPlan(
        num_slots,
        host_bytes=store_bytes + offloaded_bytes + (cache_bytes + other_bytes + reserved_bytes if on_host else 0),
        cache_bytes=cache_bytes,
        buffer_bytes=0 if on_host else buffer_bytes,
        other_bytes=other_bytes,
        reserved_bytes=reserved_bytes,
        kv_offload_bytes=kv_offload_bytes,
    )


def explain_misfit(plan: MemoryPlan, device_free: int | None, host_free: int) -> str | None:
    """None if the plan fits, otherwise the sentence what is needed, what there is, and what to change."""
    if plan.host_bytes + plan.kv_offload_bytes > host_free:
        what = "the weights, KV cache and activations" if plan.reserved_bytes and device_free is None else "the weights"
        needed, remedy = f"{plan.host_bytes / GIB:.2f} GiB", "free memory"
        if plan.kv_offload_bytes:
            needed += f", KV blocks {plan.kv_offload_bytes / GIB:.2f} GiB"
            remedy = "give --kv-offload less, free memory"
        return (
            f"not enough host memory: {what} need {needed} and {host_free / GIB:.2f} GiB are available; "
            f"{remedy}, raise the container's limit, or use a smaller model"
        )
    if device_free is None or plan.device_bytes + plan.reserved_bytes <= device_free:
        return None
    parts = [
        f"{plan.other_bytes / GIB:.2f} GiB of weights",
        f"{plan.cache_bytes / GIB:.2f} GiB of cache slots",
        f"{plan.buffer_bytes / GIB:.2f} GiB of miss buffers",
    ]
    if plan.reserved_bytes:
        parts.append(f"{plan.reserved_bytes / GIB:.2f} GiB for KV cache and activations")
    return (
        f"not enough device memory: {', '.join(parts[:-1])} and {parts[-1]} exceed the {device_free / GIB:.2f} GiB "
        f"that are free; {_remedy(plan, device_free)}"
    )


def miss_expert_num(config: OffloadConfig, num_experts: Sequence[int]) -> int:
    """Experts that each miss buffer holds.

    Long enough for the work that reads one to be enqueued while the next is filled, and all of them
    together less than half of a layer.
    """
    return config.miss_expert_num or max(1, min(16, max(num_experts) // 8))


def miss_buffer_bytes(config: OffloadConfig, formats: Sequence[ExpertFormat], num_experts: Sequence[int]) -> int:
    """Of all miss buffers together; one entry a layer in each list."""
    return NUM_BUFFERS * miss_expert_num(config, num_experts) * max(fmt.block_bytes for fmt in formats)


def count_fetch_slots(block_bytes: int, entries: int) -> int:
    """Experts that the fetch buffer of a decode path holds.

    Args:
        block_bytes: of the largest expert.
        entries: different experts that a step can need in a layer.
    """
    return max(1, min(_FETCH_BYTES // block_bytes, _MOST_FETCH_SLOTS, entries))


def _slots_wanted(
    config: OffloadConfig,
    formats: list[ExpertFormat],
    other_bytes: int,
    reserved_bytes: int,
    buffer_bytes: int,
    device_free: int | None,
) -> int:
    """Cache slots a layer, before the limit of each layer's number of experts."""
    if config.cache_expert_num is not None:
        return config.cache_expert_num
    slot_bytes = sum(fmt.block_bytes for fmt in formats)
    if config.vram_bytes is not None:
        budget = config.vram_bytes - (0 if device_free is None else buffer_bytes)
        if budget < 0:
            raise MemoryLimitError(
                f"vram of {config.vram_bytes / GIB:.2f} GiB does not hold the miss buffers of "
                f"{buffer_bytes / GIB:.2f} GiB; give more, or a smaller miss_expert_num"
            )
        return budget // slot_bytes
    if device_free is None:
        return 0
    reserved = max(RESERVED_BYTES, int(device_free * RESERVED_SHARE), reserved_bytes)
    return max(0, (device_free - reserved - other_bytes - buffer_bytes) // slot_bytes)


def _remedy(plan: MemoryPlan, device_free: int) -> str:
    """What to change so that the device's part fits."""
    if plan.cache_bytes and plan.device_bytes - plan.cache_bytes + plan.reserved_bytes <= device_free:
        return "give a smaller cache_expert_num or vram"
    if plan.reserved_bytes:
        return "give less context or concurrency, or keep weights in host memory with weights_offload_group_size"
    return "keep weights in host memory with weights_offload_group_size, or give a smaller miss_expert_num"
