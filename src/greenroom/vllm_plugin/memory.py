"""RankPlan: what a rank's experts take, known layer by layer, and the sentences that say what does not fit."""

from dataclasses import dataclass

import torch

from greenroom import hardware
from greenroom.config import OffloadConfig
from greenroom.experts.formats import ExpertFormat
from greenroom.experts.sizing import GIB, miss_buffer_bytes

_FEWER_SLOTS = "give a smaller --moe-offload-cache-expert-num / --moe-expert-cache-size"


@dataclass(frozen=True)
class RankPlan:
    """The layers that have been made so far. Pure.

    Attributes:
        wanted: slots a layer that were asked for.
        on_gpu: slots are memory of a GPU; otherwise they, too, are host memory.
        ranks: so many on this machine need the same.
        formats, num_experts: one entry a layer.
    """

    wanted: int
    on_gpu: bool
    ranks: int
    formats: tuple[ExpertFormat, ...] = ()
    num_experts: tuple[int, ...] = ()

    def with_layer(self, fmt: ExpertFormat, num_experts: int) -> "RankPlan":
        """This plan and a further layer."""
        formats, counts = (*self.formats, fmt), (*self.num_experts, num_experts)
        return RankPlan(self.wanted, self.on_gpu, self.ranks, formats, counts)

    @property
    def slots(self) -> list[int]:
        """Of each layer: no more than it has experts."""
        return [min(self.wanted, count) for count in self.num_experts]

    @property
    def slot_bytes(self) -> list[int]:
        """Of each layer's slots together."""
        return [n * fmt.block_bytes for n, fmt in zip(self.slots, self.formats, strict=True)]

    @property
    def host_bytes(self) -> list[int]:
        """Of host memory a layer."""
        blocks = [n * fmt.block_bytes for n, fmt in zip(self.num_experts, self.formats, strict=True)]
        return blocks if self.on_gpu else [a + b for a, b in zip(blocks, self.slot_bytes, strict=True)]

    def explain_host_misfit(self, before: int, now: int) -> str | None:
        """None if the last layer fits, otherwise the sentence.

        Args:
            before: bytes of host memory that were available before the first layer, to all ranks.
            now: bytes that are available, with the last layer not yet there.
        """
        *earlier, last = self.host_bytes
        if sum(self.host_bytes) * self.ranks <= before and last <= now:
            return None
        ranks = f", on each of {self.ranks} ranks" if self.ranks > 1 else ""
        slots = "" if self.on_gpu or not self.wanted else f"{_FEWER_SLOTS}, "
        return (
            f"not enough host memory for --moe-offload: layer {len(self.formats)} of experts needs "
            f"{last / GIB:.2f} GiB and those before it {sum(earlier) / GIB:.2f} GiB{ranks}; {before / GIB:.2f} GiB "
            f"were available at first, {now / GIB:.2f} GiB are now; {slots}free memory, raise the container's limit, "
            "or use a smaller model"
        )

    def explain_slots_misfit(self, free: int) -> str | None:
        """None if the slots of all layers so far fit into ``free`` bytes of the GPU, otherwise the sentence."""
        return None if sum(self.slot_bytes) <= free else self.explain_out_of_memory(free)

    def explain_out_of_memory(self, free: int) -> str:
        """Why the GPU, of which ``free`` bytes were free before, did not have the memory for slots and buffers."""
        taken = f"the buffers of misses take {self.buffer_bytes / GIB:.2f} GiB, those of decode steps come on top"
        remedy = "free GPU memory, or use more tensor-parallel ranks"
        if self.wanted:
            total, remedy = sum(self.slot_bytes) / GIB, _FEWER_SLOTS
            taken = f"{max(self.slots)} slots in each of {len(self.slots)} layers take {total:.2f} GiB, {taken}"
        return f"not enough GPU memory for --moe-offload: {taken}, and {free / GIB:.2f} GiB were free; {remedy}"

    @property
    def buffer_bytes(self) -> int:
        """Of the buffers for misses."""
        return miss_buffer_bytes(OffloadConfig(), self.formats, self.num_experts)


def device_free(device: torch.device) -> int:
    """Bytes of a GPU that torch can still give out, those included that it keeps for itself."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + hardware.cached_device_bytes(device)
