"""Pace: how much longer a lane takes than its cost model says, learnt from what layers really took."""

_WEIGHT = 0.5
"""Of the latest observation."""

_FORGET = 0.05
"""A lane that was not used drifts back to its model by so much, so that it is tried again."""

_LIMIT = 64.0


class Pace:
    """One lane's ratio of measured to predicted seconds, for each size of batch (powers of two) apart.

    A lane is slower than its model where both lanes share memory, threads share cores or a container has a
    quota, and differently so for batches that are bound by memory and by arithmetic.
    """

    def __init__(self) -> None:
        self._ratios: dict[int, float] = {}

    def ratio(self, tokens: int) -> float:
        """1 until something was observed."""
        return self._ratios.get(tokens.bit_length(), 1.0)

    def observe(self, tokens: int, predicted: float, seconds: float, exact: bool = True) -> None:
        """Takes note of one layer.

        Args:
            predicted: seconds by the cost model, uncorrected; 0 if the lane had nothing to do.
            seconds: measured.
            exact: False if the lane may have ended earlier; then this can only show that it is faster.
        """
        size = tokens.bit_length()
        old = self.ratio(tokens)
        if predicted <= 0:
            if size in self._ratios:
                self._ratios[size] = old + (1 - old) * _FORGET
            return
        new = min(max(seconds / predicted, 1 / _LIMIT), _LIMIT)
        if exact or new < old:
            self._ratios[size] = old + (new - old) * _WEIGHT
