"""Limits of control groups, versions 1 and 2: what a container, a service or a job of a cluster may use.

A limit holds for a group and all groups inside it, so those around the process's own count as well: a scheduler often
limits a group some levels above.
"""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def free_memory(root: Path = ROOT, proc: Path = PROC) -> int | None:
    """Bytes that the process may still allocate; None without a limit."""
    free = []
    for group in _groups(root, proc, "memory"):
        for limit_file, used_file, prefix, cached_key in (
            ("memory.max", "memory.current", "", "file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_", "cache"),
        ):
            limit, used = _read_number(group / limit_file), _read_number(group / used_file)
            if limit is not None and used is not None:
                # Page cache counts as used but is given up when memory is asked for, unless nothing lies behind it.
                stat = _read_stat(group / "memory.stat")
                free.append(limit - used + stat.get(prefix + cached_key, 0) - stat.get(prefix + "shmem", 0))
    return min(free, default=None)


def cpu_quota(root: Path = ROOT, proc: Path = PROC) -> float | None:
    """Cores' worth of time that the process may use; None without a limit."""
    quotas = []
    for group in _groups(root, proc, "cpu"):
        words = (_read(group / "cpu.max") or "").split()
        if not words:
            words = [_read(group / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        # "max", and -1 in version 1, stand for none.
        if len(words) == 2 and all(word.strip().isdigit() for word in words):
            quotas.append(float(words[0]) / float(words[1]))
    return min(quotas, default=None)


def _groups(root: Path, proc: Path, controller: str) -> Iterator[Path]:
    """Folders of the groups that the process is in and that ``controller`` limits, and of those around them."""
    yield root  # in a container often its own group, whatever its path is called outside
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        group = top / path.lstrip("/")
        while ".." not in group.parts and group != root:
            yield group
            group = group.parent


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _read_number(path: Path) -> int | None:
    """A whole number; None if there is no file or it says "max"."""
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _read_stat(path: Path) -> dict[str, int]:
    """Empty if there is no file."""
    lines = (line.split() for line in (_read(path) or "").splitlines())
    return {name: int(value) for name, value in lines}
