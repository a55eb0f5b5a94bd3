"""IdleGap: whether a layer of a decode step waited for the CPU, by the device's clock."""

import numpy as np

_LEAST_NS, _MOST_NS = 4_000.0, 40_000.0
"""Less and more than any device takes from its experts' end to the end of combine if nothing is to be waited for: a
clock that errs once must not decide for long."""

_FORGET = 1.01
"""A step: what was the least once is not for ever, as clocks and loads change."""

_MARGIN, _MARGIN_NS = 1.25, 3_000.0
"""Over the least, what is still taken for it: the device's clock moves in steps of up to a microsecond."""


class IdleGap:
    """How long combine ends behind the GPU's experts where the CPU has answered by then: the least that was seen.

    It takes some 9 to 14 microseconds on a GPU, more with more rows, of which a single bound of 10 would be on either
    side. Were it taken for waiting, the time that PCIe needs would pass for the CPU's delay, PCIe would get more, and
    that delay grow.
    """

    def __init__(self) -> None:
        self._least: dict[int, float] = {}  # nanoseconds, by rows

    def waited(self, rows: int, gaps_ns: np.ndarray, streamed: np.ndarray) -> np.ndarray:
        """Learns from a step, and judges it.

        Args:
            rows: of the step.
            gaps_ns: int [n], of layers that asked the CPU: from the end of the GPU's experts, or from asking if there
                were none, to the end of combine.
            streamed: bool [n], where there were any.

        Returns:
            bool [n]: layers whose sum came so late that they must have waited.
        """
        least = min(self._least.get(rows, _MOST_NS) * _FORGET, _MOST_NS)
        if streamed.any():
            least = max(min(least, float(gaps_ns[streamed].min())), _LEAST_NS)
        self._least[rows] = least
        found: np.ndarray = gaps_ns > least * _MARGIN + _MARGIN_NS
        return found
