"""How one expert lies in memory, and what it computes.

An expert is one contiguous block of bytes, the same in host memory, in a cache slot and in a miss
buffer, so that moving an expert is one copy::

    up    [up_rows, hidden]   gate rows, then up rows (only up rows when the expert has no gate)
    down  [hidden, inter]
    up_bias [up_rows], down_bias [hidden]     only where the family has biases

Every part starts on a 64-byte boundary and so does the next block.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch

ALIGNMENT = 64
"""Bytes. A cache line, an AVX-512 register and a row of an AMX tile."""

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ActivationKind(IntEnum):
    """The non-linearity between the two projections. The numbers are part of the native ABI."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU2 = 3
    SWIGLU_OAI = 4


@dataclass(frozen=True)
class Activation:
    """``a(gate) * up`` for gated experts and ``a(up)`` for others.

    With a finite ``limit``, the gate is first clamped from above and ``up`` from both sides.
    ``SWIGLU_OAI`` is gpt-oss's ``gate * sigmoid(alpha * gate) * (up + 1)``.
    """

    kind: ActivationKind
    alpha: float = 1.0
    limit: float = float("inf")


@dataclass(frozen=True)
class ExpertViews:
    """Tensors over a run of blocks; the first dimension counts the blocks. Nothing is copied.

    up: [N, up_rows, hidden]; down: [N, hidden, inter]; up_bias: [N, up_rows] and
    down_bias: [N, hidden], or None.
    """

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


@dataclass(frozen=True)
class ExpertFormat:
    """Shape, dtype and activation shared by all routed experts of a layer.

    hidden: width of an expert's input and output. inter: width between its projections.
    """

    hidden: int
    inter: int
    dtype: torch.dtype
    activation: Activation
    gated: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.inter < 1:
            raise ValueError(f"expert widths must be positive, not hidden={self.hidden} and inter={self.inter}")
        if self.dtype not in SUPPORTED_DTYPES:
            raise ValueError(f"expert weights of dtype {self.dtype} are not supported")

    @property
    def up_rows(self) -> int:
        """Rows of the first projection: 2 * inter with a gate, inter without."""
        return self.inter * (2 if self.gated else 1)

    @cached_property
    def offsets(self) -> tuple[int, int, int, int, int]:
        """Byte offsets of up, down, up_bias, down_bias inside a block, then the block's size."""
        sizes = [self.up_rows * self.hidden, self.hidden * self.inter]
        sizes += [self.up_rows, self.hidden] if self.bias else [0, 0]
        offsets = [0]
        for size in sizes:
            end = offsets[-1] + size * self.dtype.itemsize
            offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
        return tuple(offsets)  # type: ignore[return-value]

    @property
    def block_bytes(self) -> int:
        """Bytes from one expert to the next."""
        return self.offsets[-1]

    def flops(self, pairs: int) -> int:
        """Floating-point operations of ``pairs`` (token, expert) pairs, both projections."""
        return 2 * pairs * self.hidden * (self.up_rows + self.inter)

    def views(self, blocks: torch.Tensor) -> ExpertViews:
        """Typed views of ``blocks``: uint8 [N, block_bytes], contiguous, on any device.

        Raises:
            ValueError: ``blocks`` has another shape, dtype or stride.
        """
        if blocks.dtype != torch.uint8 or blocks.ndim != 2 or blocks.shape[1] != self.block_bytes:
            raise ValueError(f"expected uint8 [N, {self.block_bytes}], got {blocks.dtype} {tuple(blocks.shape)}")
        if not blocks.is_contiguous():
            raise ValueError("blocks must be contiguous")
        flat = blocks.view(self.dtype)
        pitch, count = flat.shape[1], flat.shape[0]
        up, down, up_bias, down_bias, _ = (offset // self.dtype.itemsize for offset in self.offsets)
        base = flat.storage_offset()

        def part(offset: int, *shape: int) -> torch.Tensor:
            strides = (shape[1], 1) if len(shape) == 2 else (1,)
            return flat.as_strided((count, *shape), (pitch, *strides), base + offset)

        return ExpertViews(
            up=part(up, self.up_rows, self.hidden),
            down=part(down, self.hidden, self.inter),
            up_bias=part(up_bias, self.up_rows) if self.bias else None,
            down_bias=part(down_bias, self.hidden) if self.bias else None,
        )
