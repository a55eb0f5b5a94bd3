"""Layers of a single token as one job of the CPU engine each: all but their experts.

Module by module a layer of one token is hundreds of calls, which take longer than many a product.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from greenroom.engine.attention_name import attends_by
from greenroom.engine.growing_cache import GrowingLayer
from greenroom.engine.known_parts import rope_modules
from greenroom.engine.single.attention import ATTENTION
from greenroom.engine.single.layer_job import LayerJob
from greenroom.engine.single.layer_parts import LayerParts, layer_parts
from greenroom.engine.single.passes import EnginePass
from greenroom.experts.cpu import CpuExperts

_KNOWN = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "position_embeddings"}
"""Arguments of layers. Others must be None or False."""


def take_layers(model: nn.Module, engine: CpuExperts, passing: EnginePass) -> None:
    """Behind whatever else replaces parts of the model: a layer whose parts are replaced later runs as before."""
    turning = {found.module for found in rope_modules(model)}
    for layer in list(model.modules()):
        parts = layer_parts(layer)
        if parts is not None and parts.attention in turning:
            layer.forward = SingleLayer(parts, engine, passing, layer.forward).forward


@dataclass(frozen=True)
class _Call:
    """What a layer is called with."""

    hidden: torch.Tensor
    cache: GrowingLayer
    cosines: torch.Tensor
    sines: torch.Tensor


class SingleLayer:
    """A layer's forward. The first token that it may take goes both ways, and decides for all others."""

    def __init__(self, parts: LayerParts, engine: CpuExperts, passing: EnginePass, own: Callable[..., Any]) -> None:
        self._parts = parts
        self._engine = engine
        self._passing = passing
        self._own = own
        self._places = [(place, known, vars(known).get("forward")) for place, known in parts.places().items()]
        self._job: LayerJob | None = None
        self._is_own = False  # found to be another kind of layer

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer's own."""
        call = None
        if self._passing.single and not self._is_own and not args:
            call = self._taken(hidden_states, kwargs)
        if call is None:
            return self._own(hidden_states, *args, **kwargs)
        if self._job is None or not self._job.is_current(call.cache.keys, call.cache.values):
            return self._try(call, kwargs)
        call.cache.grow()
        self._job.run(call.hidden, call.cache.keys, call.cache.values, call.cosines, call.sines)
        return self._job.residual + self._finish(self._job)

    def _finish(self, job: LayerJob) -> torch.Tensor:
        """What ``mlp`` gives, [1, 1, H]."""
        router = self._parts.router
        if router is None:
            result: torch.Tensor = self._parts.mlp(job.normal)
            return result
        return router.experts(job.normal[0], job.ids, job.weights).view_as(job.normal)

    def _taken(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> _Call | None:
        """None: not for the engine."""
        parts = self._parts
        if kwargs.get("attention_mask") is not None or any(kwargs[name] for name in kwargs.keys() - _KNOWN):
            return None
        turning = kwargs.get("position_embeddings")
        if not isinstance(turning, tuple) or len(turning) != 2 or hidden.shape != (1, 1, parts.query.in_features):
            return None
        if attends_by(parts.attention) != ATTENTION or not self._as_it_was():
            return None
        layers = getattr(kwargs.get("cache", kwargs.get("past_key_values")), "layers", ())
        layer = layers[parts.number] if parts.number < len(layers) else None
        if type(layer) is not GrowingLayer or not layer.is_initialized or layer.keys.ndim != 4 or len(layer.keys) != 1:
            return None
        cosines, sines = turning
        usual = cosines.shape == sines.shape == (1, 1, parts.head) and cosines.dtype == sines.dtype
        if not usual or not hidden.dtype == cosines.dtype == layer.keys.dtype == torch.bfloat16:
            return None
        return _Call(hidden.contiguous(), layer, cosines.contiguous(), sines.contiguous())

    def _as_it_was(self) -> bool:
        """All parts are there, and nobody has replaced or listens to what is done in their stead."""
        return all(
            place.module() is known and (place.called or _is_untouched(known, forward))
            for place, known, forward in self._places
        )

    def _try(self, call: _Call, kwargs: dict[str, Any]) -> Any:
        """The layer's own way, and then the other, which must give the same in all bits."""
        router, seen = self._parts.router, []
        listened = self._parts.mlp if router is None else router.experts
        hook = listened.register_forward_hook(lambda _, given, result: seen.append((given, result)))
        try:
            result = self._own(call.hidden, **kwargs)
        finally:
            hook.remove()
        keys, values = call.cache.keys, call.cache.values
        last = keys[:, :, -1].clone(), values[:, :, -1].clone()
        job = LayerJob.make(self._parts, self._engine, keys, values)
        if job is not None:
            job.run(call.hidden, keys, values, call.cosines, call.sines)
            same = torch.equal(keys[:, :, -1], last[0]) and torch.equal(values[:, :, -1], last[1])
            same = same and len(seen) == 1 and self._gives(job, *seen[0], result)
            keys[:, :, -1], values[:, :, -1] = last
            job = job if same else None
        self._job, self._is_own = job, job is None
        return result

    def _gives(self, job: LayerJob, given: tuple[torch.Tensor, ...], behind: torch.Tensor, result: Any) -> bool:
        """Whether a layer that has given its ``mlp``, or experts, ``given``, got ``behind`` and returned ``result`` is
        what the job and ``forward`` take it for."""
        own: tuple[torch.Tensor, ...] = (job.normal,)
        if (router := self._parts.router) is not None:
            own = job.normal[0], job.ids.long(), job.weights.to(router.dtype)
        if len(given) != len(own) or not isinstance(behind, torch.Tensor) or not isinstance(result, torch.Tensor):
            return False
        return all(map(torch.equal, given, own)) and torch.equal(result, job.residual + behind.view_as(job.normal))


def _is_untouched(module: nn.Module, forward: Any) -> bool:
    """Nobody listens to it, and if a forward has replaced its class's, it was ``forward``."""
    return not module._forward_hooks and not module._forward_pre_hooks and vars(module).get("forward") is forward
