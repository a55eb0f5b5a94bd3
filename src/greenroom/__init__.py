"""greenroom: Mixture-of-Experts models that do not fit in GPU memory, fast.

The names below are imported when they are first used, so that ``import greenroom`` stays quick.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from greenroom.config import OffloadConfig
from greenroom.errors import GreenroomError

if TYPE_CHECKING:
    from greenroom.engine.loader import load
    from greenroom.engine.offload import close, reset_stats, stats
    from greenroom.engine.profiles import profile
    from greenroom.experts.counters import LayerCounters, OffloadStats

try:
    __version__ = version("greenroom")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0.0.0"

_LAZY = {
    "load": "greenroom.engine.loader",
    "stats": "greenroom.engine.offload",
    "reset_stats": "greenroom.engine.offload",
    "close": "greenroom.engine.offload",
    "profile": "greenroom.engine.profiles",
    "OffloadStats": "greenroom.experts.counters",
    "LayerCounters": "greenroom.experts.counters",
}

__all__ = [
    "GreenroomError",
    "LayerCounters",
    "OffloadConfig",
    "OffloadStats",
    "close",
    "load",
    "profile",
    "reset_stats",
    "stats",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'greenroom' has no attribute '{name}'")
