"""The interface of weight offload, and the backend that does nothing."""

from abc import ABC, abstractmethod

from torch import nn

from greenroom.weights.select import Selection


class WeightOffloader(ABC):
    """Keeps the selected weights of one model in host memory, for as long as the model lives.

    Use: ``take`` while the model is in host memory (nothing else of it need fit on the device yet), ``attach`` once
    the model is otherwise ready, ``close`` behind its last pass.
    """

    def __init__(self, selection: Selection) -> None:
        self.selection = selection

    @property
    def bytes_beside_experts(self) -> float:
        """That cross to the device while a layer's experts do, in a pass; the mean of all layers."""
        return 0.0

    @abstractmethod
    def take(self, model: nn.Module) -> None:
        """Copies the selected weights into host blocks and points the parameters at where the device will read them.

        Raises:
            MemoryLimitError: the memory cannot be had or page-locked; nothing stays allocated.
        """

    @abstractmethod
    def attach(self, model: nn.Module, decoder: nn.Module) -> None:
        """From here on, every forward pass of ``decoder`` finds its weights."""

    @abstractmethod
    def close(self) -> None:
        """Frees all memory; the parameters are empty afterwards. All work on the device must have ended. Idempotent."""


class NoWeightOffload(WeightOffloader):
    """All weights stay on the device."""

    def __init__(self) -> None:
        super().__init__(Selection("none", (), 0, 0))

    def take(self, model: nn.Module) -> None:
        """Nothing is selected."""

    def attach(self, model: nn.Module, decoder: nn.Module) -> None:
        """Nothing moves."""

    def close(self) -> None:
        """Nothing is held."""
