"""What this machine has: memory that is left, cores that may be used, page-locking."""

import ctypes
import functools
import mmap
import os
import resource
from pathlib import Path

import torch

from greenroom.errors import MemoryLimitError

HUGE_PAGE = 2 << 20
"""Bytes."""

_CGROUP = Path("/sys/fs/cgroup")
_PORTABLE_AND_MAPPED = 1 | 2
"""CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP"""


def available_host_bytes(proc: Path = Path("/proc"), cgroup: Path = _CGROUP) -> int:
    """Bytes of host memory that can still be allocated, by the kernel's estimate and the container's limit."""
    meminfo = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit, used = _read_number(cgroup / "memory.max"), _read_number(cgroup / "memory.current")
    if limit is not None and used is not None:
        # Page cache counts as used but is given up when memory is asked for.
        cached = _read_stat(cgroup / "memory.stat", "file")
        available = min(available, limit - used + cached)
    return max(available, 0)


def cached_device_bytes(device: torch.device) -> int:
    """Bytes of a GPU that torch keeps for this process, and where nothing lies."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def usable_cores(cgroup: Path = _CGROUP) -> list[int]:
    """Cores that this process may run on; as many as the container's CPU quota allows."""
    cores = sorted(os.sched_getaffinity(0))
    quota = _cpu_quota(cgroup / "cpu.max")
    return cores if quota is None else cores[: max(1, int(quota))]


def may_pin(cgroup: Path = _CGROUP) -> bool:
    """Whether threads may be pinned. Not under a quota of less time than there are cores: containers with the same
    cores would all take the first ones, and leave the others idle."""
    quota = _cpu_quota(cgroup / "cpu.max")
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


def memlock_limit() -> str:
    """The soft RLIMIT_MEMLOCK in words."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:.0f} MiB"


def _read_number(path: Path) -> int | None:
    """A whole number in a control file; None if there is no file or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == key), 0)


def _cpu_quota(path: Path) -> float | None:
    """Cores' worth of time that cgroup v2 grants, or None without a limit."""
    try:
        quota, period = path.read_text().split()
        return float(quota) / float(period)
    except (OSError, ValueError):
        return None
