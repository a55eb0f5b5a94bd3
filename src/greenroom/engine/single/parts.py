"""Norms, rotary embedding and routers, each in one call where torch takes ten."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from greenroom.engine.known_parts import Apply, is_usual_turn, rms_epsilon, rope_modules, router_form
from greenroom.engine.single.passes import EnginePass
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.native import Isa
from greenroom.experts.rows import ROW_DTYPES, choose, norm, turn


def take_norms(model: nn.Module, isa: Isa, passing: EnginePass) -> None:
    """RMS norms whose weights have the model's dtype: with wider ones, families differ in what they round, and when."""
    for module in model.modules():
        epsilon = rms_epsilon(module)
        if epsilon is not None and module.weight.dtype in ROW_DTYPES:
            module.forward = partial(_norm, module, module.forward, isa, passing, epsilon)


def take_rope(model: nn.Module, isa: Isa, passing: EnginePass) -> None:
    """Rotary embedding of the usual kind."""
    for found in rope_modules(model):
        fused = found.forward_with(_fused_rope(found.own, isa))
        found.module.forward = partial(_either, found.module.forward, fused, passing)


def take_routers(model: nn.Module, engine: CpuExperts, passing: EnginePass) -> None:
    """Softmax routers."""
    for module in model.modules():
        form = router_form(module)
        if form is not None and module.weight.dtype in ROW_DTYPES:
            module.forward = partial(_route, module, module.forward, engine, passing, *form)


def _norm(
    module: nn.Module,
    own: Callable[..., torch.Tensor],
    isa: Isa,
    passing: EnginePass,
    epsilon: float,
    hidden_states: torch.Tensor,
) -> torch.Tensor:
    if not passing.active or hidden_states.dtype != module.weight.dtype:
        return own(hidden_states)
    return norm(isa, hidden_states.contiguous(), module.weight, epsilon)  # type: ignore[arg-type]


def _either(own: Callable[..., Any], fused: Callable[..., Any], passing: EnginePass, *args: Any, **kwargs: Any) -> Any:
    """torch.compile, for which no pass is active, does not come to see the second."""
    return fused(*args, **kwargs) if passing.active else own(*args, **kwargs)


def _fused_rope(own: Apply, isa: Isa) -> Apply:
    def apply(
        query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        usual = not rest and not named and is_usual_turn(query, key, cos, sin) and query.dtype in ROW_DTYPES
        if not usual or cos.shape[:2] != (1, query.shape[2]):
            return own(query, key, cos, sin, *rest, **named)
        cos, sin = cos.contiguous(), sin.contiguous()
        return turn(isa, query.contiguous(), cos, sin), turn(isa, key.contiguous(), cos, sin)

    return apply


def _route(
    module: nn.Module,
    own: Callable[..., Any],
    engine: CpuExperts,
    passing: EnginePass,
    normalise: bool,
    dtype: torch.dtype,
    hidden_states: torch.Tensor,
) -> Any:
    weight, top_k = module.weight, module.top_k
    assert isinstance(weight, torch.Tensor)
    assert isinstance(top_k, int)
    if not passing.active or hidden_states.dtype != weight.dtype:
        return own(hidden_states)
    rows = hidden_states.reshape(-1, weight.shape[1]).contiguous()
    by_engine = passing.multiplies(rows) and weight.dtype == torch.bfloat16
    logits = engine.linear(weight, rows) if by_engine else F.linear(rows, weight)
    weights, ids = choose(engine.isa, logits, top_k, normalise)
    return logits, weights.to(dtype), ids
