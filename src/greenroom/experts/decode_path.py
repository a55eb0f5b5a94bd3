"""DecodePath: a layer's routed experts without the host in the loop, for batches of a few tokens.

In stream order: the dispatch kernel decides and posts the CPU's share into the layer's mailbox; the GPU runs
its experts; the stream waits until the CPU engine has answered; the combine kernel adds both up. Nothing is
allocated or synchronised, so a whole step can be captured in a CUDA graph and replayed.

Who writes what:

- The host writes the ``StepTable`` before a step's work is enqueued: into one of two twins, of which the other one's
  copy may still be made for the step that runs.
- The device writes down what a step does (``PathRecord``); behind the step a copy brings it to the host, into one of
  two places by turns, of which the host may still read the other one when the next step ends.
- Buffers on the device belong to one stream: its order keeps layers apart.
- The fetch buffer is filled and read on a stream of its own, behind the dispatch kernel, while resident experts run;
  the two streams meet again before combine. Each entry has its own rows of activations and outputs. Cache slots in
  which experts land are filled and read there too: those that the host has offered, and whose own expert the layer does
  not use. Nobody else reads or writes them while the step lasts, provided that no other path runs in the same step.
- The mailbox's payload is written by the device until it raises the request, then read by the CPU engine
  until that raises done, and done is reset by the device. So each has one writer at a time.
"""

import numpy as np
import torch
import triton

from greenroom.errors import ConfigError
from greenroom.experts.expert_launches import launch_down, launch_up
from greenroom.experts.formats import ALIGNMENT, ExpertFormat
from greenroom.experts.landing import Offers
from greenroom.experts.mailbox import Mailboxes
from greenroom.experts.path_buffers import PathBuffers
from greenroom.experts.path_record import PathRecord
from greenroom.experts.step_table import StepOrder, StepTable
from greenroom.experts.store import HostStore
from greenroom.kernels.gpu.combine import combine_kernel
from greenroom.kernels.gpu.dispatch import dispatch_kernel
from greenroom.kernels.gpu.expert_ffn import ALL, CROSSING, RESIDENT
from greenroom.kernels.gpu.fetch import fetch_kernel
from greenroom.kernels.gpu.stream_wait import CPU_LIMIT_S, wait_until_one

_FETCH_STRETCH, _FETCH_BLOCK = 1 << 14, 1 << 12
"""Words of 4 bytes: what one program of the fetch kernel copies, and in what steps."""


class DecodePath:
    """All layers of a model, for batches of at most ``max_tokens``; one instance a stream.

    Attributes:
        mailboxes: those that it posts to.
        places: cache slots a layer that experts may land in, in a step.
        timed: whether the device has a clock that kernels can read.
        may_miss: whether a layer may have experts without a slot, and so ask something of the CPU engine.
        wait_limit_s: seconds that a layer waits for the CPU engine on a CPU device, where waiting blocks.
        record: what steps have done.
    """

    def __init__(
        self,
        store: HostStore,
        slots: list[torch.Tensor],
        mailboxes: Mailboxes,
        max_tokens: int,
        top_k: int,
        places: int = 0,
        cache_topk: int | None = None,
    ) -> None:
        """
        Args:
            store: page-locked, so that the device can read it.
            slots: uint8 [slots, block_bytes] a layer, on the device.
            mailboxes: for this store, ``max_tokens`` and ``top_k``.
            places: cache slots a layer that ``begin_step`` may offer; 0 for none.
            cache_topk: only a token's so many heaviest choices may land; None for all.

        Raises:
            ConfigError: the device cannot read the store.
        """
        device = slots[0].device
        if device.type == "cuda" and not store.locked:
            raise ConfigError("a GPU cannot read experts in memory that is not page-locked; drop pin_memory=False")
        if any(slot.data_ptr() % ALIGNMENT for slot in slots):
            raise ValueError(f"slots must begin at multiples of {ALIGNMENT} bytes, as the kernels are told")
        self.device = device
        self.timed = device.type == "cuda"
        self.wait_limit_s = CPU_LIMIT_S
        self.max_tokens = max_tokens
        self.top_k = top_k
        self._store = store
        self._slots = slots
        self.mailboxes = mailboxes
        self._host_base = [int(store.addresses(layer)[0]) for layer in range(len(store))]
        self.may_miss = any(self._may_miss(layer) for layer in range(len(store)))
        self._buffers = PathBuffers.of(store, max_tokens, top_k, self.may_miss, device)
        self.places = self._count_places(places)
        self._leading = top_k if cache_topk is None else min(cache_topk, top_k)
        self._fetch_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._table = StepTable(store.num_experts, self.places, device)
        self.record = PathRecord(len(store), max_tokens, top_k, self.places, device)

    @property
    def device_bytes(self) -> int:
        """Of buffers for experts and their activations."""
        return self._buffers.nbytes

    def begin_step(self, order: StepOrder) -> None:
        """Enqueues what the step's kernels need to know. At most one step before it has not ended.

        Of offers each layer's first ``places`` count.
        """
        self._table.publish(order)

    def prepare_step(self, stream_parts: np.ndarray, offers: Offers | None = None) -> None:
        """While a step runs: writes down what the next order will most likely say, so that ``begin_step`` has less to
        do. Nothing else comes of it."""
        self._table.prepare(stream_parts, offers)

    def _may_miss(self, layer: int) -> bool:
        """A layer with a slot for each expert is filled before the first step and stays so."""
        return len(self._slots[layer]) < self._store.num_experts[layer]

    def _may_land(self, layer: int) -> bool:
        return len(self._slots[layer]) > 0 and self._may_miss(layer)

    def _count_places(self, wanted: int) -> int:
        """Of ``wanted`` as many as there are slots in any layer, and as experts that a step copies."""
        slots = [len(held) for layer, held in enumerate(self._slots) if self._may_land(layer)]
        return min(wanted, self._buffers.fetch_slots, max(slots, default=0))

    def run(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Enqueues one layer.

        Args:
            hidden: [T, H] of the experts' dtype, contiguous, T at most ``max_tokens``.
            ids: integers [T, K]; ids outside [0, experts) are skipped.
            weights: floats [T, K].

        Returns:
            [T, H] of ``hidden``'s dtype: per token the weighted sum of its experts' outputs.
        """
        fmt = self._store.formats[layer]
        tokens, top_k = ids.shape
        if tokens > self.max_tokens or top_k != self.top_k:
            raise ValueError(f"this path takes [<= {self.max_tokens}, {self.top_k}] choices, not {tuple(ids.shape)}")
        ids, weights = ids.contiguous(), weights.contiguous()
        self._dispatch(layer, fmt, hidden, ids, weights)
        self._run_experts(layer, fmt, hidden, weights, tokens)
        if self._may_miss(layer):
            wait_until_one(self.mailboxes.done[layer, :1], self.device, self.wait_limit_s)
        return self._combine(layer, hidden, tokens)

    def _dispatch(
        self, layer: int, fmt: ExpertFormat, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> None:
        box, notes, (tokens, top_k) = self.mailboxes, self.record.device, ids.shape
        num_experts = self._store.num_experts[layer]
        places = self.places if self._may_land(layer) else 0
        experts_pow2, pairs_pow2 = triton.next_power_of_2(num_experts), triton.next_power_of_2(tokens * top_k)
        dispatch_kernel[(1,)](
            hidden,
            ids,
            weights,
            self._table.step,
            self._table.slot_of[layer],
            self._table.stream_parts,
            self._table.appeal[layer],
            self._table.places[layer],
            self._buffers.entries.address,
            self._buffers.entries.expert,
            self._buffers.entries.rows,
            self._buffers.entries.num,
            self._buffers.fetch_source,
            self._buffers.fetch_target,
            self._buffers.gpu_ids,
            self._buffers.cpu_num,
            box.hidden[layer],
            box.cpu_ids[layer],
            box.weights[layer],
            box.request[layer],
            box.done[layer],
            notes.ids[layer],
            notes.weights[layer],
            notes.counts[layer],
            notes.spans[layer],
            notes.landings[layer],
            self._slots[layer].data_ptr(),
            self._host_base[layer],
            self._buffers.fetched.data_ptr(),
            fmt.block_bytes,
            NUM_EXPERTS=num_experts,
            TOKENS=tokens,
            TOP_K=top_k,
            HIDDEN=fmt.hidden,
            INTER=fmt.inter,
            FETCH_SLOTS=self._buffers.fetch_slots,
            PLACES=places,
            MAY_MISS=self._may_miss(layer),
            LEADING=self._leading,
            EXPERTS_POW2=experts_pow2,
            PAIRS_POW2=pairs_pow2,
            KEY_BITS=(2 * experts_pow2 * pairs_pow2).bit_length() - 1,
            COPY_BLOCK=2048,
            TIMED=self.timed,
            num_warps=4,
        )

    def _run_experts(
        self, layer: int, fmt: ExpertFormat, hidden: torch.Tensor, weights: torch.Tensor, tokens: int
    ) -> None:
        """Resident experts at once; those that cross PCIe beside them, behind their copies."""
        if not self._may_miss(layer):
            self._compute(fmt, hidden, weights, tokens, layer, ALL)
        elif len(self._slots[layer]) == 0:
            self._fetch(fmt)
            self._compute(fmt, hidden, weights, tokens, layer, ALL)
        elif self._fetch_stream is None:
            self._fetch(fmt)
            self._compute(fmt, hidden, weights, tokens, layer, RESIDENT)
            self._compute(fmt, hidden, weights, tokens, layer, CROSSING)
        else:
            main = torch.cuda.current_stream(self.device)
            self._fetch_stream.wait_stream(main)
            with torch.cuda.stream(self._fetch_stream):
                self._fetch(fmt)
                self._compute(fmt, hidden, weights, tokens, layer, CROSSING)
            self._compute(fmt, hidden, weights, tokens, layer, RESIDENT)
            main.wait_stream(self._fetch_stream)

    def _fetch(self, fmt: ExpertFormat) -> None:
        fetch_kernel[(triton.cdiv(fmt.block_bytes, 4 * _FETCH_STRETCH), self._buffers.fetch_slots)](
            self._buffers.fetch_source,
            self._buffers.fetch_target,
            self._buffers.entries.num,
            fmt.block_bytes,
            STRETCH=_FETCH_STRETCH,
            BLOCK=_FETCH_BLOCK,
        )

    def _compute(
        self,
        fmt: ExpertFormat,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        tokens: int,
        layer: int,
        part: triton.language.constexpr,
    ) -> None:
        buffers = self._buffers
        most = min(self._store.num_experts[layer], tokens * self.top_k)
        if part is RESIDENT:
            most = min(most, len(self._slots[layer]))
        launch_up(buffers.act, hidden, buffers.gpu_ids, self.top_k, buffers.entries, most, fmt, part)
        spans = self.record.device.spans[layer]
        launch_down(buffers.partial, buffers.act, buffers.gpu_ids, weights, buffers.entries, most, spans, fmt, part)

    def _combine(self, layer: int, hidden: torch.Tensor, tokens: int) -> torch.Tensor:
        out = torch.empty_like(hidden)
        width = hidden.shape[1]
        block = min(1024, triton.next_power_of_2(width))
        combine_kernel[(tokens, triton.cdiv(width, block))](
            out,
            self._buffers.partial,
            self._buffers.gpu_ids,
            self._buffers.cpu_num,
            self.mailboxes.out[layer],
            self.mailboxes.done[layer],
            self.mailboxes.busy_ns[layer],
            self._table.step,
            self.record.device.spans[layer],
            TOP_K=self.top_k,
            HIDDEN=width,
            BLOCK=block,
            MAY_MISS=self._may_miss(layer),
            TIMED=self.timed,
        )
        return out
