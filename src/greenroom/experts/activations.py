"""The non-linearity between an expert's two projections, in torch."""

import torch
import torch.nn.functional as F

from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat


def activate(projected: torch.Tensor, fmt: ExpertFormat) -> torch.Tensor:
    """``[..., up_rows] -> [..., inter]``: the activation of one or many experts' first projection.

    Gate columns come first where the format has a gate. The result has ``projected``'s dtype.
    """
    limit = fmt.activation.limit
    if not fmt.gated:
        return _nonlinearity(projected.clamp(max=limit), fmt.activation)
    gate, up = projected.chunk(2, dim=-1)
    if limit != float("inf"):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if fmt.activation.kind == ActivationKind.SWIGLU_OAI:
        up = up + 1
    return _nonlinearity(gate, fmt.activation) * up


def _nonlinearity(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    match activation.kind:
        case ActivationKind.SILU:
            return F.silu(x)
        case ActivationKind.GELU:
            return F.gelu(x)
        case ActivationKind.GELU_TANH:
            return F.gelu(x, approximate="tanh")
        case ActivationKind.RELU2:
            return F.relu(x).square()
        case ActivationKind.SWIGLU_OAI:
            return x * torch.sigmoid(activation.alpha * x)
