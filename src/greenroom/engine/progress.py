"""Progress of long work, on the terminal or to a function of the caller's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

Progress = Callable[[int, int], None]
"""Called with (done, total) bytes; ``done`` never falls and ends at ``total``."""


@contextmanager
def loading_bar(progress: bool | Progress) -> Iterator[Progress | None]:
    """A bar on stderr with rate and time left, the caller's own function, or nothing."""
    if progress is False:
        yield None
        return
    if progress is not True:
        yield progress
        return
    with byte_bar("Loading experts") as report:
        yield report


@contextmanager
def byte_bar(title: str) -> Iterator[Progress]:
    """A bar on stderr with rate and time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(title)
        yield lambda done, total: bars.update(task, completed=done, total=total)
