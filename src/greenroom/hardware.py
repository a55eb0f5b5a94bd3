"""What this machine has: memory that is left, cores that may be used, page-locking."""

import ctypes
import functools
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path

import torch

from greenroom import cgroups
from greenroom.errors import MemoryLimitError

HUGE_PAGE = 2 << 20
"""Bytes."""

_PORTABLE_AND_MAPPED = 1 | 2
"""CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP"""


def available_host_bytes(proc: Path = cgroups.PROC, root: Path = cgroups.ROOT) -> int:
    """Bytes of host memory that can still be allocated, by the kernel's estimate and the control groups' limits."""
    meminfo = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    available, free = int(meminfo["MemAvailable"].split()[0]) * 1024, cgroups.free_memory(root, proc)
    return max(available if free is None else min(available, free), 0)


def cached_device_bytes(device: torch.device) -> int:
    """Bytes of a GPU that torch keeps for this process, and where nothing lies."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def usable_cores() -> list[int]:
    """Cores that this process may run on; as many as the control groups' quota allows."""
    cores, quota = sorted(os.sched_getaffinity(0)), cgroups.cpu_quota()
    return cores if quota is None else cores[: max(1, int(quota))]


def may_pin() -> bool:
    """Whether threads may be pinned. Not under a quota of less time than there are cores: containers with the same
    cores would all take the first ones, and leave the others idle."""
    quota = cgroups.cpu_quota()
    return quota is None or quota >= len(os.sched_getaffinity(0))


def engine_cores(threads: int | None, beside_gpu: bool) -> tuple[int, list[int] | None]:
    """Number of CPU engine threads and the cores to pin them to.

    By default one core is left to the host program beside a GPU, where it keeps launching kernels
    while the engine works. Without a GPU it only waits for the engine, so every core is taken.

    Args:
        threads: what was asked for, or None.

    Returns:
        The cores are None if there are fewer than threads, since unpinned threads share them better, or if threads
        are not to be pinned (``may_pin``).
    """
    cores = usable_cores()
    if threads is None:
        threads = max(1, len(cores) - 1) if beside_gpu else len(cores)
    return threads, cores[len(cores) - threads :] if threads <= len(cores) and may_pin() else None


def map_host_memory(size: int, purpose: str) -> torch.Tensor:
    """Zeroed memory that starts at a huge page's boundary and is backed by pages as it is written.

    Args:
        purpose: what an error says that it was for.

    Returns:
        uint8 [size]; the mapping ends with the last tensor over it.

    Raises:
        MemoryLimitError: it cannot be had.
    """
    try:
        mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryLimitError(
            f"cannot reserve {size / 2**30:.2f} GiB of host memory for {purpose} ({error.strerror}); free memory, "
            "raise the limit (ulimit -v, or the container's), or use a smaller model"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    offset = -memory.data_ptr() % HUGE_PAGE
    return memory[offset : offset + size]


_UNLOCKED = "give pin_memory=False (--no-pin-memory), which copies about three times slower"


def lock_pages(address: int, size: int, otherwise: str = _UNLOCKED) -> None:
    """Page-locks host memory for every CUDA device.

    Through the driver's own interface: a failure there is returned and nothing more, where the runtime
    would remember it and report it again from the next unrelated call.

    Args:
        otherwise: what an error says that one can do if the limit cannot be raised.

    Raises:
        MemoryLimitError: the driver refused.
    """
    torch.cuda.synchronize()  # makes the device's context current in this thread
    error = cuda_driver().cuMemHostRegister_v2(
        ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE_AND_MAPPED)
    )
    if error != 0:
        raise MemoryLimitError(
            f"cannot page-lock {size / 2**30:.2f} GiB of host memory (CUDA error {error}; the memlock "
            f"limit is {memlock_limit()}); raise it with 'ulimit -l unlimited' or the container option "
            f"'--ulimit memlock=-1', or {otherwise}"
        )


def unlock_pages(address: int) -> None:
    """Undoes ``lock_pages``."""
    torch.cuda.synchronize()
    error = cuda_driver().cuMemHostUnregister(ctypes.c_void_p(address))
    if error != 0:
        raise MemoryLimitError(f"cannot unlock host memory at {address:#x} (CUDA error {error})")


@functools.cache
def cuda_driver() -> ctypes.CDLL:
    """The driver's own interface. Raises OSError on a machine without one."""
    return ctypes.CDLL("libcuda.so.1")


def page_locks(wanted: bool) -> tuple[Callable[[int, int], None], Callable[[int], None]] | tuple[None, None]:
    """``lock_pages`` and ``unlock_pages``, or nothing instead of both."""
    return (lock_pages, unlock_pages) if wanted else (None, None)


def memlock_limit() -> str:
    """The soft RLIMIT_MEMLOCK in words."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:.0f} MiB"
