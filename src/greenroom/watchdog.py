"""Watchdog: how long something that may never end has been waited for."""

import time
from collections.abc import Callable

_LOOKS = 8
"""Looks that it takes at least to find the limit over."""


class Watchdog:
    """Counts down while it is looked at.

    What passes between two looks counts as an eighth of the limit at most: a process that was stopped for a while
    (Ctrl-Z, a debugger, a machine that was put to sleep) has not waited for anything meanwhile.
    """

    def __init__(self, limit_s: float) -> None:
        self._left = limit_s
        self._most = limit_s / _LOOKS
        self._at = time.monotonic()

    def expired(self) -> bool:
        """Looks: whether the limit is over."""
        now = time.monotonic()
        self._left -= min(now - self._at, self._most)
        self._at = now
        return self._left <= 0


def wait_until(ready: Callable[[], bool], limit_s: float, late: str) -> None:
    """Looks again and again, without a pause.

    Args:
        late: what an error says did not happen.

    Raises:
        TimeoutError: it is not ready within ``limit_s`` of this process running.
    """
    watchdog = Watchdog(limit_s)
    while not ready():
        if watchdog.expired():
            raise TimeoutError(f"{late} within {limit_s:g} s")
