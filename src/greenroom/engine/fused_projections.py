"""Queries, keys and values in one product: at a few tokens three products take three times as long as one."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

_NAMES = ("q_proj", "k_proj", "v_proj")
"""What transformers' attention modules call them."""

_MOST_ROWS = 64
"""Tokens of a pass: with more of them each product is large enough by itself, and its slices would have to be kept."""


def fuse_projections(model: nn.Module) -> int:
    """Lets every attention module multiply by its three weights at once; returns how many do.

    The weights then lie behind one another in memory; parameters, their names and the modules' own forward stay. Where
    one has moved since, or was replaced, there are three products again.
    """
    fused = 0
    for module in model.modules():
        parts = [getattr(module, name, None) for name in _NAMES]
        linears = [part for part in parts if type(part) is nn.Linear]
        if len(linears) == len(_NAMES) and _fit(linears):
            _Joint(linears)
            fused += 1
    return fused


def _fit(linears: list[nn.Linear]) -> bool:
    """Plain layers of one kind, none of which anything else has taken over or shares weights with."""
    kinds = {(part.in_features, part.weight.dtype, part.weight.device, part.bias is None) for part in linears}
    own = all("forward" not in vars(part) and part.weight.is_contiguous() for part in linears)
    return len(kinds) == 1 and own and len({part.weight.data_ptr() for part in linears}) == len(linears)


class _Joint:
    """Three linear layers whose input is the same tensor, as long as the first is called first.

    The first one's call leaves the others' results, and the others take theirs if they are given the very tensor.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        self._weight = _lay_behind_each_other([linear.weight for linear in linears])
        self._bias = None
        if linears[0].bias is not None:
            self._bias = _lay_behind_each_other([linear.bias for linear in linears])
        self._widths = [linear.out_features for linear in linears]
        self._linears = linears
        self._places = self._places_now()
        self._input: torch.Tensor | None = None  # of the results that have not been taken
        self._results: dict[int, torch.Tensor] = {}  # by place
        for place, linear in enumerate(linears):
            linear.forward = partial(self._forward, place, linear)  # type: ignore[method-assign]

    def _forward(self, place: int, linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        if hidden is self._input and place in self._results:
            result = self._results.pop(place)
            if not self._results:
                self._input = None
            return result
        if place > 0 or not _is_small(hidden) or self._places_now() != self._places:
            return F.linear(hidden, linear.weight, linear.bias)
        joint = F.linear(hidden, self._weight, self._bias)
        first, *others = joint.split(self._widths, dim=-1)
        self._input, self._results = hidden, dict(enumerate(others, 1))
        return first

    def _places_now(self) -> list[int]:
        """Where each weight and bias lies."""
        return [parameter.data_ptr() for linear in self._linears for parameter in linear.parameters()]


def _is_small(hidden: torch.Tensor) -> bool:
    """And the pass is one whose results may be kept from one call to the next."""
    rows = hidden.numel() // hidden.shape[-1]
    return rows <= _MOST_ROWS and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _lay_behind_each_other(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Moves them into one tensor."""
    with torch.no_grad():
        joint = torch.cat([parameter.data for parameter in parameters])
        for parameter, part in zip(parameters, joint.split([len(parameter) for parameter in parameters]), strict=True):
            parameter.data = part
    return joint
