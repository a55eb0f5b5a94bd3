"""Routed experts in float64, one token and one expert at a time."""

import torch

from greenroom.experts.formats import ActivationKind, ExpertFormat, ExpertViews


def moe_float64(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, views: ExpertViews, fmt: ExpertFormat
) -> torch.Tensor:
    """float64 [T, H]; ids outside [0, experts) are skipped."""
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for token in range(len(hidden)):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            if 0 <= expert < len(views.up):
                out[token] += weight * expert_float64(hidden[token].double(), expert, views, fmt)
    return out


def expert_float64(x: torch.Tensor, expert: int, views: ExpertViews, fmt: ExpertFormat) -> torch.Tensor:
    """float64 [H] -> [H]."""
    projected = views.up[expert].double() @ x
    if views.up_bias is not None:
        projected = projected + views.up_bias[expert].double()
    inner = activate_float64(projected, fmt)
    out = views.down[expert].double() @ inner
    return out if views.down_bias is None else out + views.down_bias[expert].double()


def activate_float64(projected: torch.Tensor, fmt: ExpertFormat) -> torch.Tensor:
    a = fmt.activation
    gate = torch.clamp(projected[: fmt.inter], max=a.limit)
    up = torch.clamp(projected[fmt.inter :], -a.limit, a.limit)
    match a.kind:
        case ActivationKind.SILU:
            y = gate / (1 + torch.exp(-gate))
        case ActivationKind.GELU:
            y = gate * 0.5 * (1 + torch.erf(gate / 2**0.5))
        case ActivationKind.GELU_TANH:
            y = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        case ActivationKind.RELU2:
            y = torch.clamp(gate, min=0) ** 2
        case ActivationKind.SWIGLU_OAI:
            y, up = gate / (1 + torch.exp(-a.alpha * gate)), up + 1
    return y * up if fmt.gated else y
