"""What the engine knows of a model's routed experts: which modules, which shapes."""

from dataclasses import dataclass

import torch

from greenroom.experts.formats import ExpertFormat
from greenroom.weights.select import WeightInfo


@dataclass(frozen=True)
class ExpertLayerSpec:
    """One layer's routed experts inside a transformers model.

    Attributes:
        name: the experts module's name in ``model.named_modules()``.
        layer: its number inside the model's decoder, as it stands in the name (``layers.<n>``).
        num_experts: routed experts.
        format: their shape, dtype and activation.
        transposed: the module declares its weights as [in, out].
        interleaved: gate and up rows alternate instead of standing one after the other.
    """

    name: str
    layer: int
    num_experts: int
    format: ExpertFormat
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """All expert layers of a model, and what else it will hold.

    Attributes:
        layers: in the order in which the model runs them.
        other_bytes: bytes of all parameters and buffers that are not routed experts.
        weights: those parameters.
    """

    layers: tuple[ExpertLayerSpec, ...]
    other_bytes: int
    dtype: torch.dtype
    weights: tuple[WeightInfo, ...] = ()

    @property
    def decoder(self) -> str:
        """Name of the module whose forward runs the layers."""
        return self.layers[0].name.partition("layers.")[0].rstrip(".")
