"""PathBuffers: the memory that a ``DecodePath`` works in, allocated once."""

from dataclasses import dataclass
from typing import Self

import torch

from greenroom.experts.expert_launches import Entries
from greenroom.experts.sizing import count_fetch_slots
from greenroom.experts.store import HostStore


@dataclass(frozen=True)
class PathBuffers:
    """On the device unless said otherwise. Layers use them one after another.

    An entry is an expert that the GPU computes, those that cross PCIe first; a pair is a token's choice of an expert.

    Attributes:
        entries: those of the layer, those that cross PCIe first.
        fetch_source, fetch_target: int64 [fetch slots], addresses.
        fetched: uint8, room for as many experts as there are fetch slots, or empty if none is ever fetched.
        gpu_ids: int32 [pairs], the GPU's choices, -1 elsewhere. cpu_num: int32 [1], experts left to the CPU.
        act: [entries, tokens, inner width], of the experts' dtype. partial: float32 [pairs, hidden].
    """

    entries: Entries
    fetch_source: torch.Tensor
    fetch_target: torch.Tensor
    fetched: torch.Tensor
    gpu_ids: torch.Tensor
    cpu_num: torch.Tensor
    act: torch.Tensor
    partial: torch.Tensor

    @classmethod
    def of(cls, store: HostStore, max_tokens: int, top_k: int, may_miss: bool, device: torch.device) -> Self:
        """For batches of up to ``max_tokens``; ``may_miss``: an expert may have no slot."""
        pairs = max_tokens * top_k
        entries = min(max(store.num_experts), pairs)
        hidden, inter = max(f.hidden for f in store.formats), max(f.inter for f in store.formats)
        largest = max(f.block_bytes for f in store.formats)
        slots = count_fetch_slots(largest, entries) if may_miss else 1

        def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        return cls(
            entries=Entries(
                address=zeros(entries, torch.int64),
                expert=zeros(entries, torch.int32),
                rows=zeros(entries, torch.int32),
                num=zeros(3, torch.int32),
            ),
            fetch_source=zeros(slots, torch.int64),
            fetch_target=zeros(slots, torch.int64),
            fetched=torch.empty(slots * largest if may_miss else 0, dtype=torch.uint8, device=device),
            gpu_ids=zeros(pairs, torch.int32),
            cpu_num=zeros(1, torch.int32),
            act=zeros(entries * max_tokens * inter, store.formats[0].dtype),
            partial=zeros(pairs * hidden, torch.float32),
        )

    @property
    def fetch_slots(self) -> int:
        """Experts that a step copies to the device in a layer at most."""
        return len(self.fetch_source)

    @property
    def nbytes(self) -> int:
        """Of buffers for experts and their activations; the others are small."""
        return sum(t.numel() * t.element_size() for t in (self.fetched, self.act, self.partial))
