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


def choose_tilings(tokens: int) -> tuple[Tiling, Tiling]:
    """Tiles of the up and the down kernel: products and sums for one token, matrix units for more.

    Found by trying: few long rows for the wide first projection of one token, more and shorter ones for the second.
    """
    if tokens == 1:
        return Tiling(rows=2, tokens=1, width=1024, warps=4, stages=3), Tiling(8, 1, 256, 4, 3)
    padded = max(16, triton.next_power_of_2(tokens))
    return Tiling(rows=32, tokens=padded, width=256, warps=4, stages=3), Tiling(32, padded, 128, 4, 4)
