"""OffloadConfig: every knob of expert offloading, validated once."""

import re
from dataclasses import dataclass

from greenroom.errors import ConfigError

_UNITS = {"": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((letter, 1000), (f"{letter}i", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Bytes in ``"8GiB"``, ``"500MB"``, ``"8g"`` or a plain number.

    Raises:
        ConfigError: the text is no size.
    """
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise ConfigError(f"'{text}' is not a size; write it like 8GiB, 500MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].lower()])


@dataclass(frozen=True)
class OffloadConfig:
    """How experts are offloaded.

    Attributes:
        cache_expert_num: cache slots a layer on the device. None: as many as ``vram`` holds, or,
            without ``vram``, a default for the device (see ``experts.sizing``).
        vram: bytes, or text like "8GiB", of device memory for cache slots and miss buffers.
        cache_topk: only a token's so many heaviest choices may admit or refresh an expert. None: all
            of them, which hits more often on recorded routing (docs/performance.md).
        update_expert_num: experts that may be replaced a layer a step.
        context_num_threads: threads of the CPU engine. None: all cores but one beside a GPU, all
            cores without one.
        policy: name of the score that decides eviction and admission.
        profile: path of a routing profile; needed by the ``static`` policy.
        device: "auto", "cpu", "cuda" or "cuda:N".
        isa: "auto" or the instruction set that the CPU engine must use.
        miss_expert_num: experts that each of the three miss buffers on a GPU holds. None: 16, fewer for
            models with few experts.
        pin_memory: page-lock the host store when the device is a GPU. Without it copies take a
            detour through the driver's own buffers and reach about a third of the speed.
        weights_offload_group_size, weights_offload_num_in_group, weights_offload_prefetch_step,
            weights_offload_params, weights_offload_backend: weights that are not experts and stay in host memory;
            see ``weights.config.WeightOffloadConfig``. None: not given.
    """

    cache_expert_num: int | None = None
    vram: int | str | None = None
    cache_topk: int | None = None
    update_expert_num: int = 2
    context_num_threads: int | None = None
    policy: str = "lfru"
    profile: str | None = None
    device: str = "auto"
    isa: str = "auto"
    miss_expert_num: int | None = None
    pin_memory: bool = True
    weights_offload_group_size: int | None = None
    weights_offload_num_in_group: int | None = None
    weights_offload_prefetch_step: int | None = None
    weights_offload_params: str | None = None
    weights_offload_backend: str | None = None

    def __post_init__(self) -> None:
        if self.cache_expert_num is not None and self.vram is not None:
            raise ConfigError("give cache_expert_num or vram, not both: each decides the number of cache slots")
        if self.cache_expert_num is not None:
            _require_at_least("cache_expert_num", self.cache_expert_num, 0)
        if self.vram is not None:
            parse_size(self.vram)
        if self.cache_topk is not None:
            _require_at_least("cache_topk", self.cache_topk, 1)
        _require_at_least("update_expert_num", self.update_expert_num, 0)
        if self.miss_expert_num is not None:
            _require_at_least("miss_expert_num", self.miss_expert_num, 1)
        if self.context_num_threads is not None:
            _require_at_least("context_num_threads", self.context_num_threads, 1)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"unknown device '{self.device}'; choose auto, cpu, cuda or cuda:N")

    @property
    def vram_bytes(self) -> int | None:
        """``vram`` in bytes."""
        return None if self.vram is None else parse_size(self.vram)


def _require_at_least(name: str, value: int, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{name} must be a whole number of at least {minimum}, not {value!r}")
