"""Mailboxes at the C interface: what it refuses, and what it copies. How they behave is in tests/experts."""

import ctypes
import math
import time
from collections.abc import Iterator

import pytest
import torch

from greenroom.experts.formats import ExpertFormat
from greenroom.experts.native import Isa, native_format
from greenroom.kernels.cpu.library import NativeFormat, NativeJob, NativeMailbox, last_error, load_library
from tests.kernels.batches import SILU, Batch


@pytest.fixture
def engine() -> Iterator[ctypes.c_void_p]:
    library, handle = load_library(), ctypes.c_void_p()
    assert library.gr_engine_create(1, None, -1, 0, 0, ctypes.byref(handle)) == 0
    yield handle
    library.gr_engine_destroy(handle)


class Box:
    """A native mailbox over a batch, and the memory behind it."""

    def __init__(self) -> None:
        self.batch = Batch(ExpertFormat(33, 17, torch.float32, SILU), 3, 2, 4, seed=0)
        self.words = torch.zeros(24, dtype=torch.int64)
        self.out = torch.full((4, 33), math.nan)
        self.addresses = self.batch.experts.addresses
        self.format = NativeFormat.from_buffer_copy(native_format(self.batch.format))
        job = NativeJob(
            format=ctypes.pointer(self.format),
            experts=self.addresses.ctypes.data,
            num_experts=3,
            top_k=2,
            tokens=4,
            hidden=self.batch.hidden.data_ptr(),
            ids=self.batch.ids.data_ptr(),
            weights=self.batch.weights.data_ptr(),
            out=self.out.data_ptr(),
        )
        request, done, busy = (self.words.data_ptr() + 64 * i for i in range(3))
        self.native = NativeMailbox(job=job, request=request, done=done, busy_ns=busy)

    def create(self, engine: ctypes.c_void_p) -> tuple[int, ctypes.c_void_p]:
        handle = ctypes.c_void_p()
        status = load_library().gr_mailboxes_create(engine, ctypes.byref(self.native), 1, ctypes.byref(handle))
        return status, handle


@pytest.mark.parametrize(
    ("word", "sentence"), [("request", "requests"), ("done", "the end of a job"), ("busy_ns", "the time of a job")]
)
@pytest.mark.parametrize("offset", [None, 1, 2])
def test_words_must_exist_and_be_aligned(engine: ctypes.c_void_p, word: str, sentence: str, offset: int | None) -> None:
    box = Box()
    setattr(box.native, word, None if offset is None else getattr(box.native, word) + offset)
    assert box.create(engine)[0] == 1
    assert last_error(load_library()) == f"a mailbox needs an aligned word for {sentence}"


def test_what_is_refused(engine: ctypes.c_void_p) -> None:
    library, handle = load_library(), ctypes.c_void_p()
    box = Box()
    for boxes, count in ((ctypes.byref(box.native), 0), (ctypes.byref(box.native), -1), (None, 1)):
        assert library.gr_mailboxes_create(engine, boxes, count, ctypes.byref(handle)) == 1
        assert "at least one mailbox" in last_error(library)
    box.native.job.tokens = 0
    assert box.create(engine)[0] == 1
    assert "at least one row" in last_error(library)
    box.native.job.tokens = 4
    box.native.job.out = None
    assert box.create(engine)[0] == 1
    assert last_error(library) == "the job has no output"
    box.native.job.out = box.out.data_ptr()
    box.native.job.divided = box.words.data_ptr() + 2
    assert box.create(engine)[0] == 1
    assert last_error(library) == "the divided expert's words are not aligned"


def test_boxes_and_formats_are_copied_and_outlive_their_engine() -> None:
    library, engine = load_library(), ctypes.c_void_p()
    assert library.gr_engine_create(1, None, -1, 0, 0, ctypes.byref(engine)) == 0
    box = Box()
    status, handle = box.create(engine)
    assert status == 0
    ctypes.memset(ctypes.byref(box.format), 0xFF, ctypes.sizeof(box.format))
    ctypes.memset(ctypes.byref(box.native), 0xFF, ctypes.sizeof(box.native))
    assert library.gr_mailboxes_arm(handle) == 0
    request, done, busy = (word.numpy() for word in box.words.view(3, 8))
    request[0] = 4
    end = time.monotonic() + 20
    while not done[0]:
        assert time.monotonic() < end, "the request was lost"
    box.batch.check(box.out, Isa.AUTO)
    assert busy[0] > 0
    library.gr_engine_destroy(engine)
    assert library.gr_mailboxes_arm(handle) == 1
    assert "has ended" in last_error(library)
    assert library.gr_mailboxes_disarm(handle, ctypes.byref(ctypes.c_int32())) == 0
    late = ctypes.c_int32(-1)
    assert library.gr_mailboxes_abandon(handle, 20_000, ctypes.byref(late)) == 0
    assert late.value == 0, "the end of the engine ends its jobs"
    assert library.gr_mailboxes_pending(handle) == -1
    library.gr_mailboxes_destroy(handle)


def test_destroying_disarms(engine: ctypes.c_void_p) -> None:
    library, box = load_library(), Box()
    handle = box.create(engine)[1]
    assert library.gr_mailboxes_arm(handle) == 0
    library.gr_mailboxes_destroy(handle)
    box.words[0] = 1
    time.sleep(0.02)
    assert box.words[0] == 1, "mailboxes that are gone were served"
