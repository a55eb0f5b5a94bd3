"""Many copies in one call of the driver, each by address."""

import ctypes

import numpy as np

from greenroom.errors import EngineError
from greenroom.hardware import cuda_driver

_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: a source is read when its turn in the stream comes, not before."""


class _Location(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("number", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    _fields_ = [
        ("source_order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    ]


def has_batch_copy() -> bool:
    """Whether the driver knows such a call: from CUDA 12.8 on."""
    driver = cuda_driver()
    return hasattr(driver, "cuMemcpyBatchAsync_v2") or hasattr(driver, "cuMemcpyBatchAsync")


def copy_batch(targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
    """Copies between page-locked and device memory, behind the stream's work so far and in any order among themselves.

    Args:
        targets, sources: int64 [n], addresses.
        sizes: int64 [n], bytes.
        stream: handle of a stream other than the default one, of the context that is current.

    Raises:
        EngineError: the driver refused; some of the copies may be under way.
    """
    count = len(sizes)
    if count == 0:
        return
    # The arrays are read before the call returns.
    targets, sources, sizes = (np.ascontiguousarray(array, dtype=np.int64) for array in (targets, sources, sizes))
    attributes, first = _Attributes(source_order=_STREAM_ORDER), ctypes.c_size_t(0)
    arguments = [
        ctypes.c_void_p(targets.ctypes.data),
        ctypes.c_void_p(sources.ctypes.data),
        ctypes.c_void_p(sizes.ctypes.data),
        ctypes.c_size_t(count),
        ctypes.byref(attributes),
        ctypes.byref(first),
        ctypes.c_size_t(1),
    ]
    driver = cuda_driver()
    if hasattr(driver, "cuMemcpyBatchAsync_v2"):
        error = driver.cuMemcpyBatchAsync_v2(*arguments, ctypes.c_void_p(stream))
    else:
        # Before CUDA 13 the call also says which copy it disliked.
        failed = ctypes.c_size_t(0)
        error = driver.cuMemcpyBatchAsync(*arguments, ctypes.byref(failed), ctypes.c_void_p(stream))
    if error != 0:
        raise EngineError(f"the driver refuses a batch of {count} copies (CUDA error {error})")
