"""Kernels by Triton's interpreter, which runs program after program: with fewer of them tests take a fraction."""

import pytest
import torch
import triton

from greenroom.experts import expert_launches
from greenroom.kernels.gpu.tiling import Tiling


def few_large_tiles(patch: pytest.MonkeyPatch) -> None:
    """Of the experts' kernels; what they compute does not depend on it. On a GPU nothing changes."""
    if torch.cuda.is_available():
        return

    def choose(tokens: int, itemsize: int) -> tuple[Tiling, Tiling]:
        # A tile holds all tokens.
        rows = tokens if tokens == 1 else max(16, triton.next_power_of_2(tokens))
        return (Tiling(64, rows, 64, 4, 3),) * 2

    patch.setattr(expert_launches, "choose_tilings", choose)
