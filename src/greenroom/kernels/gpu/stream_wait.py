"""Makes a stream wait for a word in page-locked memory; captured in CUDA graphs like any other work."""

import ctypes

import torch

from greenroom.errors import EngineError
from greenroom.hardware import cuda_driver
from greenroom.watchdog import wait_until

_WAIT_REACHED, _WAIT_EQUAL = 0x0, 0x1
"""The word minus the value is not negative; the word is the value."""

CPU_LIMIT_S = 60.0
"""How long a wait on a CPU device may block."""


def wait_until_one(word: torch.Tensor, device: torch.device, limit_s: float = CPU_LIMIT_S) -> None:
    """Work enqueued behind this on the current stream of ``device`` starts once ``word`` is 1.

    On a CPU device, where work is not enqueued but done, this blocks.

    Args:
        word: int32 [1], page-locked host memory.
        limit_s: seconds that this may block on a CPU device.

    Raises:
        EngineError: the driver refused.
        TimeoutError: on a CPU device, the limit has passed.
    """
    if device.type != "cuda":
        _block(word, limit_s)
        return
    _enqueue(word, 1, _WAIT_EQUAL, device)


def wait_until_reached(word: torch.Tensor, value: int, device: torch.device) -> None:
    """Work enqueued behind this on the current stream of ``device``, a GPU, starts once ``word`` has come to ``value``.

    Args:
        word: int32 [1], page-locked host memory, whose values rise and may wrap round.
        value: in the range of int32.

    Raises:
        EngineError: the driver refused.
    """
    _enqueue(word, value, _WAIT_REACHED, device)


def _enqueue(word: torch.Tensor, value: int, condition: int, device: torch.device) -> None:
    stream = torch.cuda.current_stream(device).cuda_stream
    error = cuda_driver().cuStreamWaitValue32_v2(
        ctypes.c_void_p(stream),
        ctypes.c_uint64(word.data_ptr()),
        ctypes.c_uint32(value),
        ctypes.c_uint(condition),
    )
    if error != 0:
        raise EngineError(f"the driver cannot let a stream wait for host memory (CUDA error {error})")


def _block(word: torch.Tensor, limit_s: float) -> None:
    view = word.numpy()
    wait_until(lambda: bool(view[0] == 1), limit_s, "the CPU engine did not answer")
