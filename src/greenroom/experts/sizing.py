"""What the device and the host will hold, computed before anything is allocated. Pure."""

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
        reserved_bytes: kept free on the device for KV cache and activations.
    """

    num_slots: tuple[int, ...]
    host_bytes: int
    cache_bytes: int
    buffer_bytes: int
    other_bytes: int
    reserved_bytes: int

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
    reserved_bytes: int | None = None,
) -> MemoryPlan:
    """Decides the number of cache slots and checks that everything fits.

    Args:
        formats, num_experts: one entry a layer.
        other_bytes: of weights that are not experts.
        device_free: bytes free on the GPU; None on a machine without one.
        host_free: bytes of host memory that can be allocated.
        offloaded_bytes: of weights that are not experts but stay in host memory, not part of ``other_bytes``.
        reserved_bytes: that KV cache and activations will need (on the host, without a GPU). None: not known; then a
            share of the device's memory is kept, unless the number of slots or ``vram`` is given.

    Raises:
        MemoryLimitError: it does not fit; says what is needed and what there is.
    """
    buffer_bytes = NUM_BUFFERS * miss_expert_num(config, num_experts) * max(fmt.block_bytes for fmt in formats)
    if reserved_bytes is None:
        reserved = 0 if device_free is None else max(RESERVED_BYTES, int(device_free * RESERVED_SHARE))
    else:
        reserved = reserved_bytes
    wanted = _slots_wanted(config, formats, other_bytes + reserved, buffer_bytes, device_free)
    num_slots = tuple(min(wanted, count) for count in num_experts)
    cache_bytes = sum(n * fmt.block_bytes for n, fmt in zip(num_slots, formats, strict=True))
    store_bytes = sum(n * fmt.block_bytes for n, fmt in zip(num_experts, formats, strict=True))
    on_host = device_free is None
    # Without a GPU nothing is ever streamed, and memory that is never written is never backed by pages.
    plan = MemoryPlan(
        num_slots,
        host_bytes=store_bytes + offloaded_bytes + (cache_bytes + other_bytes + reserved if on_host else 0),
        cache_bytes=cache_bytes,
        buffer_bytes=0 if on_host else buffer_bytes,
        other_bytes=other_bytes,
        reserved_bytes=reserved,
    )
    _check(plan, device_free, host_free, needs_reserve=reserved_bytes is not None)
    return plan


def miss_expert_num(config: OffloadConfig, num_experts: list[int]) -> int:
    """Experts that each miss buffer holds.

    Long enough for the work that reads one to be enqueued while the next is filled, and all of them
    together less than half of a layer.
    """
    return config.miss_expert_num or max(1, min(16, max(num_experts) // 8))


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
    taken_bytes: int,
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
    return max(0, (device_free - taken_bytes - buffer_bytes) // slot_bytes)


def _check(plan: MemoryPlan, device_free: int | None, host_free: int, needs_reserve: bool) -> None:
    if plan.host_bytes > host_free:
        raise MemoryLimitError(
            f"not enough host memory: the weights need {plan.host_bytes / GIB:.2f} GiB and "
            f"{host_free / GIB:.2f} GiB are available; free memory, raise the container's limit, or use a smaller model"
        )
    reserved = plan.reserved_bytes if needs_reserve else 0
    if device_free is not None and plan.device_bytes + reserved > device_free:
        parts = [
            f"{plan.other_bytes / GIB:.2f} GiB of weights",
            f"{plan.cache_bytes / GIB:.2f} GiB of cache slots",
            f"{plan.buffer_bytes / GIB:.2f} GiB of miss buffers",
        ]
        if reserved:
            parts.append(f"{reserved / GIB:.2f} GiB for KV cache and activations")
        raise MemoryLimitError(
            f"not enough device memory: {', '.join(parts[:-1])} and {parts[-1]} exceed the {device_free / GIB:.2f} GiB "
            f"that are free; {_remedy(plan, reserved, device_free)}"
        )


def _remedy(plan: MemoryPlan, reserved: int, device_free: int) -> str:
    """What to change so that the device's part fits."""
    if plan.cache_bytes and plan.device_bytes - plan.cache_bytes + reserved <= device_free:
        return "give a smaller cache_expert_num or vram"
    if reserved:
        return "give less context or concurrency, or keep weights in host memory with weights_offload_group_size"
    return "keep weights in host memory with weights_offload_group_size, or give a smaller miss_expert_num"
