"""Loads the native CPU expert engine. The declarations mirror ``greenroom_cpu.h``."""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from greenroom.errors import EngineError

ABI_VERSION = 13
_PATH = Path(__file__).with_name("libgreenroom_cpu.so")


class NativeFormat(ctypes.Structure):
    """``gr_format``: one expert's shape, dtype, activation and the offsets of its parts in bytes."""

    _fields_ = [
        ("hidden", c_int32),
        ("inter", c_int32),
        ("dtype", c_int32),
        ("gated", c_int32),
        ("has_bias", c_int32),
        ("activation", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
        ("up", c_int64),
        ("down", c_int64),
        ("up_bias", c_int64),
        ("down_bias", c_int64),
    ]


class NativeJob(ctypes.Structure):
    """``gr_job``: a batch of tokens. The native side copies the structure, not what it points to."""

    _fields_ = [
        ("format", POINTER(NativeFormat)),
        ("experts", c_void_p),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("tokens", c_int64),
        ("hidden", c_void_p),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("out", c_void_p),
        ("divided", c_void_p),
        ("done", c_void_p),
        ("done_value", c_uint32),
        ("busy_ns", c_void_p),
    ]


class NativeLinear(ctypes.Structure):
    """``gr_linear``: a product of rows with a dense matrix. The native side copies the structure."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("x", c_void_p),
        ("y", c_void_p),
        ("tokens", c_int64),
        ("rows", c_int64),
        ("width", c_int64),
        ("dtype", c_int32),
    ]


class NativeAttention(ctypes.Structure):
    """``gr_attention``: one new token over a KV cache. The native side copies the structure."""

    _fields_ = [
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("length", c_int64),
        ("k_head", c_int64),
        ("k_position", c_int64),
        ("v_head", c_int64),
        ("v_position", c_int64),
        ("heads", c_int32),
        ("key_heads", c_int32),
        ("width", c_int32),
        ("value_width", c_int32),
        ("dtype", c_int32),
        ("scale", c_float),
    ]


class NativeRow(ctypes.Structure):
    """``gr_row``: something between the products of one token. The native side copies the structure."""

    _fields_ = [
        ("kind", c_int32),
        ("dtype", c_int32),
        ("x", c_void_p),
        ("y", c_void_p),
        ("z", c_void_p),
        ("out", c_void_p),
        ("ids", c_void_p),
        ("rows", c_int64),
        ("pitch", c_int64),
        ("width", c_int32),
        ("weights_dtype", c_int32),
        ("normalise", c_int32),
        ("epsilon", c_float),
    ]


class NativeStep(ctypes.Structure):
    """``gr_step``: a step of a sequence. The native side copies what it points to, and what of it is structures."""

    _fields_ = [("kind", c_int32), ("count", c_int32), ("what", c_void_p)]


class NativeMailbox(ctypes.Structure):
    """``gr_mailbox``: a job that a device posts by itself, and the words through which it does."""

    _fields_ = [("job", NativeJob), ("request", c_void_p), ("done", c_void_p), ("busy_ns", c_void_p)]


@cache
def load_library(path: Path = _PATH) -> ctypes.CDLL:
    """The native library. Its calls release the interpreter lock.

    Args:
        path: of another build.

    Raises:
        EngineError: it is missing, cannot be loaded, or belongs to another version.
    """
    if not path.exists():
        raise EngineError(
            f"the CPU engine is missing: there is no {path}; reinstall greenroom from a wheel or build it"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise EngineError(f"the CPU engine cannot be loaded: {error}; reinstall greenroom") from error
    library.gr_abi_version.argtypes = []
    library.gr_abi_version.restype = c_int32
    version = library.gr_abi_version()
    if version != ABI_VERSION:
        raise EngineError(f"{path} has interface version {version}, not {ABI_VERSION}; reinstall greenroom")
    library.gr_isa_supported.argtypes = []
    library.gr_isa_supported.restype = c_uint32
    library.gr_engine_create.argtypes = [c_int32, POINTER(c_int32), c_int32, c_int32, c_int32, POINTER(c_void_p)]
    library.gr_engine_create.restype = c_int32
    library.gr_engine_destroy.argtypes = [c_void_p]
    library.gr_engine_destroy.restype = None
    library.gr_engine_isa.argtypes = [c_void_p]
    library.gr_engine_isa.restype = c_int32
    library.gr_submit.argtypes = [c_void_p, POINTER(NativeJob), POINTER(c_uint64)]
    library.gr_submit.restype = c_int32
    library.gr_linear_submit.argtypes = [c_void_p, POINTER(NativeLinear), POINTER(c_uint64)]
    library.gr_linear_submit.restype = c_int32
    library.gr_attention_submit.argtypes = [c_void_p, POINTER(NativeAttention), POINTER(c_uint64)]
    library.gr_attention_submit.restype = c_int32
    library.gr_sequence_submit.argtypes = [c_void_p, POINTER(NativeStep), c_int32, POINTER(c_uint64)]
    library.gr_sequence_submit.restype = c_int32
    _declare_rows(library)
    library.gr_wait.argtypes = [c_void_p, c_uint64, c_int64, POINTER(c_int32)]
    library.gr_wait.restype = c_int32
    library.gr_engine_throttle.argtypes = [c_void_p, c_double]
    library.gr_engine_throttle.restype = c_int32
    library.gr_mailboxes_create.argtypes = [c_void_p, POINTER(NativeMailbox), c_int32, POINTER(c_void_p)]
    library.gr_mailboxes_create.restype = c_int32
    library.gr_mailboxes_destroy.argtypes = [c_void_p]
    library.gr_mailboxes_destroy.restype = None
    library.gr_mailboxes_arm.argtypes = [c_void_p]
    library.gr_mailboxes_arm.restype = c_int32
    library.gr_mailboxes_disarm.argtypes = [c_void_p, POINTER(c_int32)]
    library.gr_mailboxes_disarm.restype = c_int32
    library.gr_mailboxes_abandon.argtypes = [c_void_p, c_int64, POINTER(c_int32)]
    library.gr_mailboxes_abandon.restype = c_int32
    library.gr_mailboxes_failure.argtypes = [c_void_p, POINTER(c_int32)]
    library.gr_mailboxes_failure.restype = c_int32
    library.gr_mailboxes_pending.argtypes = [c_void_p]
    library.gr_mailboxes_pending.restype = c_int32
    library.gr_last_error.argtypes = []
    library.gr_last_error.restype = c_char_p
    return library


def _declare_rows(library: ctypes.CDLL) -> None:
    kind = [c_int32, c_int32]
    library.gr_norm.argtypes = [*kind, c_void_p, c_void_p, c_void_p, c_int64, c_int32, c_float]
    library.gr_turn.argtypes = [*kind, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int32]
    library.gr_choose.argtypes = [*kind, c_void_p, c_int64, c_int32, c_int32, c_int32, c_void_p, c_void_p]
    for function in (library.gr_norm, library.gr_turn, library.gr_choose):
        function.restype = None


def last_error(library: ctypes.CDLL) -> str:
    """The sentence of the latest failure in this thread."""
    return str(library.gr_last_error().decode())
