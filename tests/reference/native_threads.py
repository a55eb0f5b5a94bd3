"""Threads of CPU engines in this process, as the kernel lists them."""

from pathlib import Path


def engine_tasks() -> list[Path]:
    """Directories of this process's engine threads; the names are thread ids."""
    return [task for task in Path("/proc/self/task").iterdir() if _name(task) == "greenroom-cpu"]


def _name(task: Path) -> str:
    """Empty for a thread that has just ended."""
    try:
        return (task / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
