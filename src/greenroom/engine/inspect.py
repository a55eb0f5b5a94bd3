"""Finds the routed experts of a transformers model and describes them."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from greenroom.engine.spec import ExpertLayerSpec, ModelSpec
from greenroom.errors import UnsupportedModelError
from greenroom.experts.activations import activate
from greenroom.experts.formats import SUPPORTED_DTYPES, Activation, ActivationKind, ExpertFormat
from greenroom.weights.select import weights_of

_PROBE_ROWS = 64


def inspect_model(model: PreTrainedModel) -> ModelSpec:
    """Describes every routed-experts module of ``model``, which may be on the meta device.

    Raises:
        UnsupportedModelError: there are none, or one computes what greenroom cannot.
    """
    modules = list(expert_modules(model))
    if not modules:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no routed experts; greenroom runs Mixture-of-Experts models"
        )
    layers = tuple(_describe(name, module) for name, module in modules)
    experts = [tensor for _, module in modules for tensor in module.parameters()]
    expert_ids = {id(tensor) for tensor in experts}
    others = {id(t): t for t in (*model.parameters(), *model.buffers()) if id(t) not in expert_ids}
    return ModelSpec(
        layers,
        sum(t.numel() * t.element_size() for t in others.values()),
        layers[0].format.dtype,
        weights_of(model, without=experts),
    )


def expert_modules(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of each module that transformers dispatches through its experts interface."""
    for name, module in model.named_modules():
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed") and hasattr(module, "num_experts"):
            yield name, module


def _describe(name: str, module: Any) -> ExpertLayerSpec:
    layer = re.search(r"\blayers\.(\d+)\b", name)
    if layer is None:
        raise UnsupportedModelError(f"experts module '{name}' does not belong to a numbered decoder layer")
    if getattr(module, "has_post_expert_norm", False):
        raise UnsupportedModelError(f"{type(module).__name__} normalises after each expert, which is not supported")
    down = module.down_proj
    hidden, inter = down.shape[1:] if not module.is_transposed else (down.shape[2], down.shape[1])
    if down.dtype not in SUPPORTED_DTYPES:
        raise UnsupportedModelError(f"experts of dtype {down.dtype} are not supported; use BF16, FP16 or FP32")
    return ExpertLayerSpec(
        name=name,
        layer=int(layer[1]),
        num_experts=down.shape[0],
        format=ExpertFormat(
            hidden, inter, down.dtype, _identify_activation(module), gated=module.has_gate, bias=module.has_bias
        ),
        transposed=module.is_transposed,
        interleaved=module.has_gate and not module.is_concatenated,
    )


def _identify_activation(module: Any) -> Activation:
    """The activation that reproduces the module's own, found by trying each on the same numbers.

    Families override the gate in their own ways; comparing what it computes is safer than trusting
    its name.
    """
    with torch.no_grad(), torch.device("cpu"):
        gate, up = torch.linspace(-9, 9, _PROBE_ROWS), torch.linspace(8, -8, _PROBE_ROWS).roll(17)
        probe = torch.cat([gate, up]).unsqueeze(0)
        if not module.has_gate:
            expected = module.act_fn(probe)
        elif module.is_concatenated:
            expected = module._apply_gate(probe)
        else:
            expected = module._apply_gate(probe.view(2, -1).T.reshape(1, -1))
    for candidate in _candidates(module):
        fmt = ExpertFormat(1, _PROBE_ROWS, torch.float32, candidate, gated=module.has_gate)
        if torch.allclose(activate(probe, fmt), expected, rtol=1e-5, atol=1e-5):
            return candidate
    raise UnsupportedModelError(
        f"{type(module).__name__} uses an activation that greenroom does not compute; "
        f"it has {', '.join(kind.name for kind in ActivationKind)}"
    )


def _candidates(module: Any) -> Iterator[Activation]:
    limits = [float("inf")]
    limits += [float(value) for key in ("limit", "swiglu_limit") if (value := getattr(module, key, None)) is not None]
    alphas = {1.0, float(getattr(module, "alpha", None) or 1.0), float(getattr(module, "swiglu_alpha", None) or 1.0)}
    for limit in limits:
        for kind in ActivationKind:
            for alpha in alphas if kind == ActivationKind.SWIGLU_OAI else {1.0}:
                yield Activation(kind, alpha, limit)
