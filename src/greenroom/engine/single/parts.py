"""Norms, rotary embedding and routers of a single token, each in one call where torch takes ten."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from greenroom.engine.known_parts import Apply, is_usual_turn, replace_rope, rms_epsilon, router_form
from greenroom.engine.single.linears import is_large
from greenroom.engine.single.passes import SinglePass
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.native import Isa
from greenroom.experts.rows import ROW_DTYPES, choose, norm, turn


def take_norms(model: nn.Module, isa: Isa, single: SinglePass) -> None:
    """RMS norms whose weights have the model's dtype: with wider ones, families differ in what they round, and when."""
    for module in model.modules():
        epsilon = rms_epsilon(module)
        if epsilon is not None and module.weight.dtype in ROW_DTYPES:
            module.forward = partial(_norm, module, module.forward, isa, single, epsilon)


def take_rope(model: nn.Module, isa: Isa, single: SinglePass) -> None:
    """Rotary embedding of the usual kind."""
    replace_rope(model, lambda own: partial(_rope, own, isa, single))


def take_routers(model: nn.Module, engine: CpuExperts, single: SinglePass) -> None:
    """Softmax routers."""
    for module in model.modules():
        form = router_form(module)
        if form is not None and module.weight.dtype in ROW_DTYPES:
            module.forward = partial(_route, module, module.forward, engine, single, *form)


def _norm(
    module: nn.Module,
    own: Callable[..., torch.Tensor],
    isa: Isa,
    single: SinglePass,
    epsilon: float,
    hidden_states: torch.Tensor,
) -> torch.Tensor:
    if not single.active or hidden_states.dtype != module.weight.dtype:
        return own(hidden_states)
    return norm(isa, hidden_states.contiguous(), module.weight, epsilon)  # type: ignore[arg-type]


def _rope(
    own: Apply,
    isa: Isa,
    single: SinglePass,
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    special = rest or named or not single.active or query.dtype not in ROW_DTYPES
    if special or not is_usual_turn(query, key, cos, sin) or not query.shape[0] == query.shape[2] == 1:
        return own(query, key, cos, sin, *rest, **named)
    cos, sin = cos.contiguous(), sin.contiguous()
    return turn(isa, query.contiguous(), cos, sin), turn(isa, key.contiguous(), cos, sin)


def _route(
    module: nn.Module,
    own: Callable[..., Any],
    engine: CpuExperts,
    single: SinglePass,
    normalise: bool,
    dtype: torch.dtype,
    hidden_states: torch.Tensor,
) -> Any:
    weight, top_k = module.weight, module.top_k
    assert isinstance(weight, torch.Tensor)
    assert isinstance(top_k, int)
    if not single.active or hidden_states.numel() != weight.shape[1] or hidden_states.dtype != weight.dtype:
        return own(hidden_states)
    row = hidden_states.reshape(1, -1).contiguous()
    logits = engine.linear(weight, row) if is_large(weight) else F.linear(row, weight)
    weights, ids = choose(engine.isa, logits, top_k, normalise)
    return logits, weights.to(dtype), ids
