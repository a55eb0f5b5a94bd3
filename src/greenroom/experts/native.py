"""Instruction sets and formats, as the native engine takes them."""

from enum import IntEnum
from functools import lru_cache

import torch

from greenroom.errors import ConfigError
from greenroom.experts.formats import ExpertFormat
from greenroom.kernels.cpu.library import NativeFormat, load_library

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class Isa(IntEnum):
    """Instruction sets, in rising order of preference. The numbers are part of the native ABI."""

    AUTO = -1
    PORTABLE = 0
    AVX2 = 1
    AVX512_BF16 = 2
    AMX_BF16 = 3

    @property
    def label(self) -> str:
        """The name that users see and type."""
        return self.name.lower().replace("_", "-")

    @classmethod
    def parse(cls, text: str) -> "Isa":
        """The instruction set called ``text``: its label, "auto" included.

        Raises:
            ConfigError: there is none of that name.
        """
        for isa in cls:
            if isa.label == text.lower():
                return isa
        choices = ", ".join(isa.label for isa in cls)
        raise ConfigError(f"there is no instruction set {text!r}; choose one of {choices}")


def supported_isas() -> tuple[Isa, ...]:
    """What this processor and its operating system run, best last.

    Raises:
        EngineError: the native library cannot be loaded.
    """
    bits = load_library().gr_isa_supported()
    return tuple(isa for isa in Isa if isa is not Isa.AUTO and bits >> isa & 1)


@lru_cache(maxsize=64)
def native_format(format: ExpertFormat) -> NativeFormat:
    """``format`` as the native engine takes it."""
    up, down, up_bias, down_bias, _ = format.offsets
    return NativeFormat(
        hidden=format.hidden,
        inter=format.inter,
        dtype=DTYPES[format.dtype],
        gated=format.gated,
        has_bias=format.bias,
        activation=int(format.activation.kind),
        alpha=format.activation.alpha,
        limit=format.activation.limit,
        up=up,
        down=down,
        up_bias=up_bias,
        down_bias=down_bias,
    )
