"""MoeOffloadOptions: what a vLLM engine was asked to do about its experts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from greenroom.config import OffloadConfig
from greenroom.errors import ConfigError
from greenroom.experts.policies import make_policy, policy_names

CONFIG_KEY = "moe_offload"
"""Of vLLM's ``additional_config``, the one dictionary that reaches workers and the hash of compiled graphs."""

SHORT_FORM = "moe_expert_cache_size"
"""The argument that turns offloading on and gives the number of slots at once."""


def _policies() -> str:
    """Names of those that need no profile."""
    return ", ".join(name for name in policy_names() if name != "static")


@dataclass(frozen=True)
class MoeOffloadOptions:
    """Knobs of offloading under vLLM; their meaning is that of ``OffloadConfig``'s."""

    cache_expert_num: int = 0
    cache_topk: int | None = None
    update_expert_num: int = 2
    context_num_threads: int | None = None
    policy: str = "lfru"

    def __post_init__(self) -> None:
        self.to_config()
        if self.policy == "static":
            raise ConfigError(
                "--moe-offload has no policy 'static', since it takes no recorded profile to keep the experts of; "
                f"choose one of {_policies()}"
            )
        if self.policy not in policy_names():
            raise ConfigError(f"--moe-offload has no policy '{self.policy}'; choose one of {_policies()}")
        make_policy(self.policy)

    def to_config(self) -> OffloadConfig:
        """The core's configuration.

        Raises:
            ConfigError: a value makes no sense.
        """
        return OffloadConfig(
            cache_expert_num=self.cache_expert_num,
            cache_topk=self.cache_topk,
            update_expert_num=self.update_expert_num,
            context_num_threads=self.context_num_threads,
            policy=self.policy,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they lie in ``additional_config``."""
        return asdict(self)

    @classmethod
    def from_additional_config(cls, additional_config: object) -> "MoeOffloadOptions | None":
        """What ``additional_config["moe_offload"]`` asks for: ``True`` or a dictionary of fields; None without it.

        Raises:
            ConfigError: it is neither, or has fields that do not exist.
        """
        if not isinstance(additional_config, Mapping):
            return None
        given = additional_config.get(CONFIG_KEY)
        if given is None or given is False:
            return None
        if given is True:
            return cls()
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"additional_config['{CONFIG_KEY}'] is true or a dictionary with some of {', '.join(names)}, "
                f"not {given!r}"
            )
        if unknown := set(given) - set(names):
            raise ConfigError(
                f"additional_config['{CONFIG_KEY}'] has no field {', '.join(sorted(map(str, unknown)))}; "
                f"choose from {', '.join(names)}"
            )
        return cls(**given)


@dataclass(frozen=True)
class Flag:
    """One flag of ``vllm serve``; ``LLM(...)`` takes it as a keyword argument of the same name.

    name: with underscores. field: of MoeOffloadOptions; None for those that turn offloading on.
    """

    name: str
    help: str
    field: str | None = None
    type: type = int


FLAGS = (
    Flag("moe_offload", "Keep routed experts in host memory, and run them on GPU and CPU together.", type=bool),
    Flag("moe_offload_cache_expert_num", "Experts of each layer that have a slot in GPU memory.", "cache_expert_num"),
    Flag(
        "moe_offload_cache_topk",
        "Only a token's so many heaviest choices may admit or refresh an expert. Default: all of them.",
        "cache_topk",
    ),
    Flag("moe_offload_update_expert_num", "Experts replaced in a layer's slots after a step.", "update_expert_num"),
    Flag(
        "moe_offload_context_num_threads",
        "Threads of the CPU engine of each rank. Default: the rank's share of the cores, but one.",
        "context_num_threads",
    ),
    Flag("moe_offload_policy", f"What decides which experts keep a slot: {_policies()}.", "policy", str),
    Flag(SHORT_FORM, "Short for --moe-offload with so many slots a layer.", "cache_expert_num"),
)
"""In the order of ``--help``."""


def collect(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the flags among ``arguments`` (name to value; None means not given) say.

    Returns:
        Fields of ``MoeOffloadOptions`` that were given, or None if offloading was not asked for.

    Raises:
        ConfigError: flags that contradict each other, or details of an offloading that nobody asked for.
    """
    given = {flag.name: arguments[flag.name] for flag in FLAGS if arguments.get(flag.name) is not None}
    switch = given.pop("moe_offload", None)
    if SHORT_FORM in given:
        if switch is False:
            raise ConfigError(f"--{_dashed(SHORT_FORM)} turns offloading on, --no-moe-offload off; give one of them")
        if "moe_offload_cache_expert_num" in given:
            raise ConfigError(
                f"--{_dashed(SHORT_FORM)} and --moe-offload-cache-expert-num both give the number of slots; "
                "give one of them"
            )
    elif not switch:
        if given:
            raise ConfigError(
                f"--{_dashed(next(iter(given)))} needs --moe-offload, which turns expert offloading on; add it"
            )
        return None
    return {flag.field: given[flag.name] for flag in FLAGS if flag.name in given and flag.field is not None}


def _dashed(name: str) -> str:
    return name.replace("_", "-")
