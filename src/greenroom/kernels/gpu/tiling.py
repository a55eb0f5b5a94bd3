"""How the expert kernels cut their work. Found by trying on an H100."""

from dataclasses import dataclass

import triton


@dataclass(frozen=True)
class Tiling:
    """Sizes of the tiles that one program of an expert kernel reads."""

    rows: int
    tokens: int
    width: int
    warps: int
    stages: int

    def arguments(self) -> dict[str, int]:
        """As the kernels take them."""
        return {
            "BLOCK_ROWS": self.rows,
            "BLOCK_TOKENS": self.tokens,
            "BLOCK_WIDTH": self.width,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def choose_tilings(tokens: int, itemsize: int) -> tuple[Tiling, Tiling]:
    """Tiles of the up and the down kernel: products and sums for one token, matrix units for more.

    A tile of a row is what one warp reads at once, or two; more programs with fewer rows hide better how long the first
    bytes take. What is under way for a program fits into 99 KiB of shared memory, all that consumer GPUs have.

    Args:
        itemsize: bytes of a weight.
    """
    if tokens == 1:
        return Tiling(rows=1, tokens=1, width=1024, warps=2, stages=1), Tiling(2, 1, 1024, 4, 1)
    padded = max(16, triton.next_power_of_2(tokens))
    width = 256 // itemsize
    return Tiling(rows=64, tokens=padded, width=width, warps=4, stages=2), Tiling(64, padded, width, 4, 3)
