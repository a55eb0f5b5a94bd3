"""StepSequence: steps of one token between its experts, which the native engine runs one behind another as one job.

Made once, and run for every token: whoever runs it again first changes the pointers that have moved.
"""

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch

from greenroom.experts.native import DTYPES
from greenroom.kernels.cpu.library import NativeAttention, NativeLinear, NativeRow, NativeStep

NativePart = NativeLinear | NativeRow | NativeAttention

_KINDS = {NativeLinear: 0, NativeRow: 1, NativeAttention: 2}


class RowKind(IntEnum):
    """``gr_row_kind``."""

    NORM = 0
    TURN = 1
    CHOOSE = 2
    STORE = 3
    ADD = 4


class StepSequence:
    """Native steps, and the structures that they point to."""

    def __init__(self, steps: Sequence[Sequence[NativePart]]) -> None:
        """
        Args:
            steps: in each either products that do not depend on each other, or rows, one after another, or one
                attention. What they point to must stay where it is while the sequence runs.
        """
        self._parts: list[ctypes.Array[Any]] = [(type(step[0]) * len(step))(*step) for step in steps]  # type: ignore[misc]
        native = [
            NativeStep(_KINDS[type(step[0])], len(step), ctypes.addressof(part))
            for step, part in zip(steps, self._parts, strict=True)
        ]
        self.native = (NativeStep * len(native))(*native)

    def part(self, step: int, number: int = 0) -> Any:
        """The structure in the sequence, to be changed."""
        return self._parts[step][number]


def norm_row(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> NativeRow:
    """RMS norm of ``x`` [..., W] by ``weight`` [W] to ``out``, which may be ``x``; see ``rows.norm``."""
    width = weight.numel()
    return _row(RowKind.NORM, x, out, x.numel() // width, width, y=weight.data_ptr(), epsilon=epsilon)


def turn_row(x: torch.Tensor, width: int, out: torch.Tensor) -> NativeRow:
    """Rotary embedding of heads of ``width`` in ``x`` to ``out``. Cosines and sines are to be set: ``y`` and ``z``."""
    return _row(RowKind.TURN, x, out, x.numel() // width, width)


def choose_row(
    logits: torch.Tensor, normalise: bool, dtype: torch.dtype, weights: torch.Tensor, ids: torch.Tensor
) -> NativeRow:
    """The likeliest experts by ``logits`` [E]: float32 ``weights`` [K], rounded to ``dtype``, int32 ``ids`` [K]."""
    more = {"ids": ids.data_ptr(), "normalise": normalise, "weights_dtype": DTYPES[dtype]}
    return _row(RowKind.CHOOSE, logits, weights, ids.numel(), logits.numel(), **more)


def store_row(x: torch.Tensor, width: int) -> NativeRow:
    """Copies heads of ``width``. Where to is to be set: ``out`` and ``pitch``, the elements from head to head there."""
    row = _row(RowKind.STORE, x, x, x.numel() // width, width)
    row.out = None
    return row


def add_row(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> NativeRow:
    """``out = x + y``, all of one dtype."""
    return _row(RowKind.ADD, x, out, 1, x.numel(), y=y.data_ptr())


def _row(kind: RowKind, x: torch.Tensor, out: torch.Tensor, rows: int, width: int, **more: float) -> NativeRow:
    return NativeRow(
        kind=kind, dtype=DTYPES[x.dtype], x=x.data_ptr(), out=out.data_ptr(), rows=rows, width=width, **more
    )
