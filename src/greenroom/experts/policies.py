"""Eviction and admission policies: each is a score, and the lowest score is evicted.

A policy of another package is found through the entry-point group ``greenroom.policies``: a callable
that takes no arguments and returns a ``Policy``.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

import numpy as np

from greenroom.errors import ConfigError
from greenroom.experts.usage import ExpertUsage

ENTRY_POINT_GROUP = "greenroom.policies"


class Policy(Protocol):
    """Ranks experts. Pure: the same usage gives the same scores.

    Attributes:
        margin: a candidate replaces a resident only with more than so many times its score. At least 1.
    """

    margin: float

    def scores(self, usage: ExpertUsage) -> np.ndarray:
        """float [layers, experts]; the higher, the more worth keeping."""
        ...


class LRU:
    """Keeps what was used last."""

    margin = 1.0

    def scores(self, usage: ExpertUsage) -> np.ndarray:
        return usage.last_used.astype(np.float64)


class LFU:
    """Keeps what was used most since loading."""

    margin = 1.0

    def scores(self, usage: ExpertUsage) -> np.ndarray:
        return usage.total


class LFRU:
    """Keeps what is used often and was used lately: decayed frequency / (1 + age).

    A candidate has just been used, so its age is 0 and flatters it. The margin makes up for that: on
    recorded routing it saves most of the copies and keeps the hits (docs/performance.md).
    """

    margin = 8.0

    def scores(self, usage: ExpertUsage) -> np.ndarray:
        return usage.frequency / (1 + usage.age)


class Static:
    """Keeps the experts that a recorded profile names, whatever is used now."""

    margin = 1.0

    def __init__(self, profile: np.ndarray) -> None:
        """profile: float [layers, experts], how often each expert was chosen when it was recorded."""
        self._profile = profile

    def scores(self, usage: ExpertUsage) -> np.ndarray:
        self.check(*usage.total.shape)
        return self._profile

    def check(self, layers: int, experts: int) -> None:
        """
        Raises:
            ConfigError: the profile is not of a model with so many layers of so many experts at most.
        """
        if self._profile.shape != (layers, experts):
            raise ConfigError(
                f"the profile covers {self._profile.shape[0]} layers of {self._profile.shape[1]} experts, "
                f"the model has {layers} of {experts}"
            )


class FirstCome:
    """The experts that are admitted first stay: what the others are to be compared with."""

    margin = 1.0

    def scores(self, usage: ExpertUsage) -> np.ndarray:
        return np.zeros_like(usage.total)


_BUILT_IN: dict[str, Callable[[], Policy]] = {"lru": LRU, "lfu": LFU, "lfru": LFRU, "first-come": FirstCome}


def policy_names() -> list[str]:
    """Every name that ``make_policy`` accepts here."""
    return sorted({*_BUILT_IN, "static", *entry_points(group=ENTRY_POINT_GROUP).names})


def make_policy(name: str, profile: str | Path | None = None) -> Policy:
    """The policy called ``name``.

    Args:
        profile: for ``static``, a .npy file of float [layers, experts].

    Raises:
        ConfigError: no such policy, no profile where one is needed, or one that cannot be read or is not used.
    """
    if profile is not None and name != "static":
        raise ConfigError(f"a profile only serves the static policy, not '{name}'")
    if name == "static":
        if profile is None:
            raise ConfigError(
                "the static policy keeps what a profile names: give one (--profile FILE.npy), which "
                "`greenroom generate --save-profile FILE.npy` writes"
            )
        return Static(_read_profile(Path(profile)))
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            policy: Policy = entry.load()()
            return policy
    raise ConfigError(f"unknown policy '{name}'; choose one of {', '.join(policy_names())}")


def _read_profile(path: Path) -> np.ndarray:
    try:
        profile = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"cannot read the profile '{path}': {error}") from error
    if profile.ndim != 2 or not np.issubdtype(profile.dtype, np.number) or not np.isfinite(profile).all():
        raise ConfigError(f"the profile '{path}' must hold one finite number a layer and expert")
    return profile.astype(np.float64)
