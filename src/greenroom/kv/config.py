"""KVOffloadConfig: how much host memory KV blocks get, and how it is used."""

from dataclasses import dataclass

from greenroom.config import parse_size
from greenroom.errors import ConfigError
from greenroom.kv.policies import POLICIES


@dataclass(frozen=True)
class KVOffloadConfig:
    """
    Attributes:
        size: bytes of host memory, or text like "8GiB".
        block_factor: device blocks in a host block. More of them make fewer entries to keep books of, but a sequence
            is stored and found by whole host blocks only.
        policy: which block leaves when host memory is full: "lru" or "arc".

    Raises:
        ConfigError: a value that cannot be honoured.
    """

    size: int | str
    block_factor: int = 1
    policy: str = "lru"

    def __post_init__(self) -> None:
        if parse_size(self.size) <= 0:
            raise ConfigError("KV offload needs some host memory; give a size like 8GiB, or leave it out")
        if self.block_factor < 1:
            raise ConfigError(f"the block factor of KV offload must be at least 1, not {self.block_factor}")
        if self.policy not in POLICIES:
            raise ConfigError(f"the policy of KV offload is one of {', '.join(POLICIES)}, not '{self.policy}'")

    @classmethod
    def from_options(
        cls, size: int | str | None, block_factor: int | None, policy: str | None
    ) -> "KVOffloadConfig | None":
        """What a command line says; None for what it leaves out, and if it leaves out everything.

        Raises:
            ConfigError: a value that cannot be honoured, or options without a size.
        """
        given = {"block_factor": block_factor, "policy": policy}
        chosen = {name: value for name, value in given.items() if value is not None}
        if size is not None:
            return cls(size, **chosen)  # type: ignore[arg-type]
        if chosen:
            options = " and ".join(f"--kv-offload-{name.replace('_', '-')}" for name in chosen)
            raise ConfigError(f"{options} needs KV offload; give --kv-offload a size")
        return None

    @property
    def num_bytes(self) -> int:
        """``size`` as a number."""
        return parse_size(self.size)
