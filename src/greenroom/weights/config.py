"""WeightOffloadConfig: which weights that are not experts stay in host memory, and how they reach the device."""

import re
from dataclasses import dataclass

from greenroom.errors import ConfigError

BACKENDS = ("none", "prefetch", "uva")


@dataclass(frozen=True)
class WeightOffloadConfig:
    """Validated settings; ``choose`` makes one from what a user gave.

    Attributes:
        backend: "none"; "prefetch" copies a layer's weights into a buffer on the device ahead of its turn;
            "uva" lets the device read them in host memory whenever it needs them.
        group_size, num_in_group: decoder layer i is offloaded if ``i % group_size >= group_size - num_in_group``.
        prefetch_step: buffers on the device, each for one layer; a layer is copied so many offloaded layers ahead.
        params: a regular expression; only parameters in whose name it is found are offloaded. None: all of an
            offloaded layer's.
    """

    backend: str = "none"
    group_size: int = 1
    num_in_group: int = 1
    prefetch_step: int = 1
    params: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"unknown weights_offload_backend '{self.backend}'; choose one of {', '.join(BACKENDS)}")
        for name in ("group_size", "num_in_group", "prefetch_step"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"weights_offload_{name} must be a whole number of at least 1, not {value!r}")
        if self.num_in_group > self.group_size:
            raise ConfigError(
                f"weights_offload_num_in_group of {self.num_in_group} is more than the group's {self.group_size} "
                "layers; give a larger weights_offload_group_size"
            )
        if self.params is not None:
            try:
                re.compile(self.params)
            except re.error as error:
                raise ConfigError(
                    f"weights_offload_params '{self.params}' is no regular expression: {error}"
                ) from error

    @classmethod
    def choose(
        cls,
        backend: str | None = None,
        group_size: int | None = None,
        num_in_group: int | None = None,
        prefetch_step: int | None = None,
        params: str | None = None,
    ) -> "WeightOffloadConfig":
        """Fills in what was not given (None): a group size alone means prefetch, a backend alone every layer.

        Raises:
            ConfigError: a value out of range, or one that nothing would use.
        """
        if backend is None:
            backend = "none" if group_size is None else "prefetch"
        given = {"group_size": group_size, "num_in_group": num_in_group, "prefetch_step": prefetch_step}
        unused = [name for name, value in (given | {"params": params}).items() if value is not None]
        if backend == "none" and unused:
            raise ConfigError(
                f"weights_offload_{unused[0]} has no effect without offloaded weights; give weights_offload_group_size "
                "or weights_offload_backend prefetch or uva as well"
            )
        if backend == "uva" and prefetch_step is not None:
            raise ConfigError(
                "weights_offload_prefetch_step has no effect with the uva backend, which copies nothing ahead; "
                "leave it out, or choose prefetch"
            )
        return cls(backend, **{name: 1 if value is None else value for name, value in given.items()}, params=params)
