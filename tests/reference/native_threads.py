"""Threads of CPU engines in this process, as the kernel lists them."""

import time
from pathlib import Path


def engine_tasks() -> list[Path]:
    """Directories of this process's engine threads; the names are thread ids."""
    return [task for task in Path("/proc/self/task").iterdir() if _name(task) == "greenroom-cpu"]


def engine_tasks_left(expected: int) -> int:
    """How many engine threads there are once those that have been joined are gone, which may take a moment longer.

    Args:
        expected: returns as soon as there are so many.
    """
    deadline = time.monotonic() + 5
    while (left := len(engine_tasks())) > expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return left


def _name(task: Path) -> str:
    """Empty for a thread that has just ended."""
    try:
        return (task / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
