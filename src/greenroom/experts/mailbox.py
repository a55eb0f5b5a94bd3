"""Mailboxes: how a device hands routed experts to the CPU engine without the host's Python in between.

The device writes a layer's rows, ids and weights, then the number of rows into its request word. A worker of the
engine that has nothing else to do sees it, all of them compute, and the done word tells the device, which clears it.
"""

import ctypes
import logging
import weakref
from threading import Lock

import torch

from greenroom.errors import EngineError
from greenroom.experts.cpu import CpuExperts, keep_for_ever
from greenroom.experts.native import native_format
from greenroom.experts.store import HostStore
from greenroom.kernels.cpu.library import NativeJob, NativeMailbox, last_error, load_library

logger = logging.getLogger(__name__)

LATE_JOB_S = 5.0
"""How long ``close`` waits for the jobs of abandoned mailboxes."""

_DESTROY_S = 0.5
"""The same, for mailboxes that nobody has any more."""

_LINE = 64
"""Bytes of a cache line. Words that different sides write share none."""

_DIVIDED_WORD = 1
"""Of a request's line: the divided expert, and behind it the CPU's first row."""


class Mailboxes:
    """Page-locked memory through which a device hands routed experts to the CPU engine, one mailbox a layer.

    All tensors are on the CPU, page-locked if asked for, and start as zeros but for one word:

    - ``request``: int32 [L, 16]. Word 0 of each row: rows posted. The device writes it behind everything else,
      the engine clears it before it begins. Words 1 and 2: an expert that is divided between device and CPU, or -1 (at
      first) for none, and the first row of its inner width that the CPU computes, a multiple of 32 within the width.
      The CPU adds its down bias.
    - ``done``: int32 [L, 16]. Word 0: 1 once ``out`` is complete (or the job failed). The device clears it.
    - ``hidden``: of each layer, [max_tokens, H] of its dtype.
    - ``cpu_ids``: int32 [L, max_tokens, K]. The choices that the CPU computes, -1 for others.
    - ``weights``: float32 [L, max_tokens, K].
    - ``out``: of each layer, float32 [max_tokens, H]. The sum over the CPU's choices; only posted rows are written.
    - ``busy_ns``: int64 [L, 8]. Word 0: nanoseconds from the last request's turn (jobs run one after another) to
      raising done.

    A layer has one request outstanding at most; different layers, and other mailboxes of the same engine, may have
    theirs at the same time. The store must outlive the mailboxes.

    Once they are abandoned, a job that was begun may go on for as long as it likes. It reads ``hidden``, ``cpu_ids``,
    ``weights``, ``request`` and experts' blocks, and writes ``out``, ``busy_ns`` and ``done``, of which nobody makes
    anything any more. All this memory stays, even if the store is closed, until the job has ended, or else until the
    process ends.
    """

    def __init__(self, engine: CpuExperts, store: HostStore, max_tokens: int, top_k: int, pin_memory: bool) -> None:
        """``max_tokens`` rows a layer, ``top_k`` choices a row.

        Raises:
            EngineError: the engine is closed or refuses a layer.
        """
        layers = len(store)
        self._engine = engine
        self._library = load_library()
        self._lock = Lock()
        self._closed = False
        self._abandoned = False
        self._ended = False  # closed, and no job is under way
        # Made once: each step asks, and the device idles meanwhile.
        self._failed = ctypes.c_int32()
        self._failed_at = ctypes.byref(self._failed)
        self.request = _lines(layers, torch.int32, pin_memory)
        self.request[:, _DIVIDED_WORD] = -1
        self.done = _lines(layers, torch.int32, pin_memory)
        self.busy_ns = _lines(layers, torch.int64, pin_memory)
        choices = (layers, max_tokens, top_k)
        self.cpu_ids = torch.zeros(choices, dtype=torch.int32, pin_memory=pin_memory)
        self.weights = torch.zeros(choices, dtype=torch.float32, pin_memory=pin_memory)
        self.hidden: list[torch.Tensor] = []
        self.out: list[torch.Tensor] = []
        for fmt in store.formats:
            shape = (max_tokens, fmt.hidden)
            self.hidden.append(torch.zeros(shape, dtype=fmt.dtype, pin_memory=pin_memory))
            self.out.append(torch.zeros(shape, dtype=torch.float32, pin_memory=pin_memory))
        self._addresses = [store.addresses(layer) for layer in range(layers)]
        boxes = (NativeMailbox * layers)(*(self._native(store, layer) for layer in range(layers)))
        self._handle = engine.open_mailboxes(boxes, self)
        # What a job may touch: on its own, it outlives both these mailboxes and the store.
        self._blocks = [store.blocks(layer) for layer in range(layers)]
        touched = (self.request, self.done, self.busy_ns, self.cpu_ids, self.weights, self.hidden, self.out)
        # Only once nobody can be inside a method any more.
        weakref.finalize(self, _destroy, self._handle, (*touched, self._addresses, self._blocks))

    def _native(self, store: HostStore, layer: int) -> NativeMailbox:
        _, max_tokens, top_k = self.cpu_ids.shape
        job = NativeJob(
            format=ctypes.pointer(native_format(store.formats[layer])),
            experts=self._addresses[layer].ctypes.data,
            num_experts=store.num_experts[layer],
            top_k=top_k,
            tokens=max_tokens,
            hidden=self.hidden[layer].data_ptr(),
            ids=self.cpu_ids[layer].data_ptr(),
            weights=self.weights[layer].data_ptr(),
            out=self.out[layer].data_ptr(),
            divided=self.request[layer, _DIVIDED_WORD:].data_ptr(),
        )
        return NativeMailbox(
            job=job,
            request=self.request[layer].data_ptr(),
            done=self.done[layer].data_ptr(),
            busy_ns=self.busy_ns[layer].data_ptr(),
        )

    def arm(self) -> None:
        """Wakes the engine's workers, which look for requests until ``disarm``. Arming twice is fine.

        Raises:
            EngineError: the mailboxes or their engine are closed, or the mailboxes are abandoned.
        """
        with self._lock:
            if self._closed:
                raise EngineError("the mailboxes are closed")
            self._check(self._library.gr_mailboxes_arm(self._handle))

    def disarm(self) -> bool:
        """Waits for jobs that were begun and lets the workers sleep. Requests not seen by then stay posted.

        Returns:
            Whether a job has failed, and ``raise_failure`` has not been called since.
        """
        with self._lock:
            self._disarm()
            return self._failed.value != 0

    def _disarm(self) -> None:
        self._check(self._library.gr_mailboxes_disarm(self._handle, self._failed_at))

    def abandon(self, limit_s: float) -> bool:
        """Gives the mailboxes up, for good: requests are dropped and done of every layer is raised, both at once.

        Then waits for jobs that were begun, for no longer than ``limit_s``. May be called again, only to wait. What
        a layer has in ``out`` from now on is unknown.

        Returns:
            Whether no job is under way any more.
        """
        # Without the lock: whoever has it may wait for the very job that does not end.
        self._abandoned = True
        return _abandon(self._handle, limit_s)

    def release_device(self) -> None:
        """Of abandoned mailboxes: raises done of every layer once more, for a device that has asked since."""
        self.done[:, 0] = 1

    def raise_failure(self) -> None:
        """Raises the first failure since the last call, if there was one.

        Raises:
            EngineError: a job failed; the sentence names its layer.
        """
        layer = ctypes.c_int32()
        if self._library.gr_mailboxes_failure(self._handle, ctypes.byref(layer)):
            raise EngineError(f"layer {layer.value}: {last_error(self._library)}")

    def pending(self) -> int | None:
        """A layer whose request has not been answered; for a watchdog."""
        layer = self._library.gr_mailboxes_pending(self._handle)
        return None if layer < 0 else layer

    def close(self) -> None:
        """Disarms for good. The engine may be closed already; closing twice is fine.

        Waits for jobs that were begun. After ``abandon`` it waits for ``LATE_JOB_S`` at most: a job that lasts longer
        keeps its memory and the engine's threads, and a warning says so. Closing again looks again.
        """
        with self._lock:
            if self._ended:
                return
            self._closed = True
            if not self._abandoned:
                self._disarm()
            elif not self.abandon(LATE_JOB_S):
                logger.warning(
                    "the CPU engine's job of layer %s was given up and has not ended within %g s more; "
                    "the memory that it uses stays allocated",
                    self.pending(),
                    LATE_JOB_S,
                )
                return
            self._ended = True
            self._blocks.clear()
        self._engine.forget_mailboxes(self)

    def _check(self, status: int) -> None:
        if status:
            raise EngineError(last_error(self._library))


def _abandon(handle: ctypes.c_void_p, limit_s: float) -> bool:
    library, late = load_library(), ctypes.c_int32()
    if library.gr_mailboxes_abandon(handle, int(limit_s * 1000), ctypes.byref(late)):
        raise EngineError(last_error(library))
    return not late.value


def _destroy(handle: ctypes.c_void_p, touched: tuple[object, ...]) -> None:
    """Nobody has these mailboxes any more."""
    # At the end of the process too, which a job that hangs must not put off.
    if _abandon(handle, _DESTROY_S):
        load_library().gr_mailboxes_destroy(handle)
    else:
        keep_for_ever(touched)
        logger.warning("mailboxes were dropped while a job of the CPU engine lasts; its memory stays allocated")


def _lines(rows: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
    """Zeros [rows, 64 bytes], each row a cache line."""
    memory = torch.zeros((rows + 1) * _LINE, dtype=torch.uint8, pin_memory=pin_memory)
    start = -memory.data_ptr() % _LINE
    return memory[start : start + rows * _LINE].view(dtype).view(rows, _LINE // dtype.itemsize)
