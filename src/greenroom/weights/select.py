"""Which weights are offloaded, and where they lie in their layer's block. Pure."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from greenroom.errors import ConfigError
from greenroom.weights.config import WeightOffloadConfig

ALIGNMENT = 256
"""Bytes; a weight begins at a multiple of it, as in memory that torch allocates."""


@dataclass(frozen=True)
class WeightInfo:
    """One parameter. ``names``: all its names in ``model.named_parameters``; a tied one has several."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of its values."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def padded_bytes(self) -> int:
        """Of its place in a block."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Unit:
    """Weights that move together: those of one decoder layer, or (``layer`` None) one outside of the layers.

    module: name of the module whose forward is the only one that reads them: the decoder layer, or a part of it.
    """

    layer: int | None
    module: str
    weights: tuple[WeightInfo, ...]

    @property
    def nbytes(self) -> int:
        """Of its block."""
        return sum(weight.padded_bytes for weight in self.weights)

    def views(self, block: torch.Tensor) -> list[torch.Tensor]:
        """``block``, uint8 [nbytes or more], as one tensor a weight."""
        views, offset = [], 0
        for weight in self.weights:
            piece = block[offset : offset + weight.nbytes]
            views.append(piece.view(weight.dtype).view(weight.shape))
            offset += weight.padded_bytes
        return views


@dataclass(frozen=True)
class Selection:
    """What is offloaded. ``num_slots``: buffers on the device, each as large as the largest unit."""

    backend: str
    units: tuple[Unit, ...]
    num_slots: int
    num_layers: int

    @property
    def weight_bytes(self) -> int:
        """Of the offloaded weights alone."""
        return sum(weight.nbytes for unit in self.units for weight in unit.weights)

    @property
    def host_bytes(self) -> int:
        """Of all blocks in host memory."""
        return sum(unit.nbytes for unit in self.units)

    @property
    def slot_bytes(self) -> int:
        """Of one buffer on the device."""
        return max((unit.nbytes for unit in self.units), default=0)

    @property
    def device_bytes(self) -> int:
        """Of all buffers on the device."""
        return self.num_slots * self.slot_bytes

    @property
    def pass_bytes(self) -> int:
        """That cross to the device in a pass: a unit with a buffer to itself stays there, all others are copied."""
        if self.backend == "uva":
            return self.weight_bytes
        staying = range(max(0, len(self.units) - self.num_slots), self.num_slots)
        return sum(unit.nbytes for number, unit in enumerate(self.units) if number not in staying)

    def __str__(self) -> str:
        if not self.units:
            return "none"
        layers = sum(unit.layer is not None for unit in self.units)
        weights = sum(len(unit.weights) for unit in self.units)
        text = f"{self.backend}, {weights} weights of {layers} of {self.num_layers} layers"
        text += f", {self.weight_bytes / 1e6:,.1f} MB in host memory"
        if self.num_slots:
            text += f", {self.num_slots} buffers of {self.slot_bytes / 1e6:,.1f} MB on the device"
        return text


def weights_of(model: nn.Module, without: Iterable[nn.Parameter] = ()) -> tuple[WeightInfo, ...]:
    """Every parameter of ``model``, which may be on the meta device, but those of ``without``."""
    excluded = {id(parameter) for parameter in without}
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in excluded:
            names.setdefault(id(parameter), []).append(name)
            parameters[id(parameter)] = parameter
    return tuple(WeightInfo(tuple(names[i]), tuple(p.shape), p.dtype) for i, p in parameters.items())


def select(weights: Sequence[WeightInfo], decoder: str, config: WeightOffloadConfig) -> Selection:
    """Chooses what ``config`` asks for.

    Args:
        weights: all that are not experts.
        decoder: name of the module with the decoder's ``layers``; "" if that is the model itself.

    Raises:
        ConfigError: nothing is selected, or a weight that is shared cannot be prefetched.
    """
    if config.backend == "none":
        return Selection("none", (), 0, 0)
    start = f"{decoder}.layers." if decoder else "layers."
    layers: dict[int, list[WeightInfo]] = {}
    outside = []
    for weight in weights:
        places = {_layer_of(name, start) for name in weight.names}
        layer = next((place for place in places if place is not None), None)
        if layer is None:
            outside.append(weight)
        else:
            layers.setdefault(layer, []).append(weight)
    count = max(layers, default=-1) + 1
    units = []
    for layer in sorted(layers):
        chosen = tuple(weight for weight in layers[layer] if _matches(weight, config.params) and weight.nbytes)
        if chosen and layer % config.group_size >= config.group_size - config.num_in_group:
            units.append(Unit(layer, _reader(chosen, f"{start}{layer}"), chosen))
    if config.backend == "uva" and config.params is not None:
        # Read in place, a weight needs no turn in the order of the layers, so that embeddings may be chosen as well.
        units += [
            Unit(None, weight.names[0].rpartition(".")[0], (weight,))
            for weight in outside
            if _matches(weight, config.params) and weight.nbytes
        ]
    if not units:
        raise ConfigError(_nothing(config, count))
    if config.backend == "prefetch":
        _refuse_shared(units)
    slots = min(config.prefetch_step, len(units)) if config.backend == "prefetch" else 0
    return Selection(config.backend, tuple(units), slots, count)


def _layer_of(name: str, start: str) -> int | None:
    found = re.match(re.escape(start) + r"(\d+)\.", name)
    return int(found[1]) if found else None


def _matches(weight: WeightInfo, pattern: str | None) -> bool:
    return pattern is None or any(re.search(pattern, name) for name in weight.names)


def _reader(weights: Sequence[WeightInfo], layer: str) -> str:
    """The layer's child that holds all ``weights``, or the layer. Not deeper: what lies next to each other inside
    such a part may read each other's weights."""
    parts = {weight.names[0][len(layer) + 1 :].split(".")[0] for weight in weights if "." in weight.names[0]}
    deep = all(weight.names[0].count(".") > layer.count(".") + 1 for weight in weights)
    return f"{layer}.{parts.pop()}" if len(parts) == 1 and deep else layer


def _refuse_shared(units: Sequence[Unit]) -> None:
    for unit in units:
        for weight in unit.weights:
            if len(weight.names) > 1:
                raise ConfigError(
                    f"'{weight.names[0]}' is the same weight as '{weight.names[1]}' and cannot be prefetched for one "
                    "layer alone; leave it out with weights_offload_params, or choose the uva backend"
                )


def _nothing(config: WeightOffloadConfig, layers: int) -> str:
    if config.params is None:
        return (
            f"no layer is offloaded: of the {layers} layers none has i % {config.group_size} >= "
            f"{config.group_size - config.num_in_group}; give a smaller weights_offload_group_size"
        )
    where = "the model" if config.backend == "uva" else "an offloaded decoder layer"
    return (
        f"weights_offload_params '{config.params}' is found in no weight of {where}; it is searched for in names "
        "like 'model.layers.0.self_attn.q_proj.weight', and experts do not count"
    )
