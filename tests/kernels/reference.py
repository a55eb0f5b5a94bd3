"""The expert feed-forward network, written to be obviously right: float64, one pair after another."""

import math

import numpy as np
import torch

from greenroom.experts.formats import ActivationKind, ExpertFormat


class Experts:
    """``count`` experts with random weights, in blocks of a format, and the blocks' addresses."""

    def __init__(self, format: ExpertFormat, count: int, generator: torch.Generator, offset: int = 0) -> None:
        """offset: bytes, a multiple of 64, to move every block further into its memory."""
        self.format = format
        self.count = count
        size = count * format.block_bytes
        # Guard bytes of NaN patterns around the blocks: whoever reads past a part gets a NaN.
        self._memory = torch.full((size + offset + 256,), 0xFF, dtype=torch.uint8)
        start = -self._memory.data_ptr() % 64 + offset
        self.blocks = self._memory[start : start + size].view(count, format.block_bytes)
        if self.blocks.storage_offset() % format.dtype.itemsize:
            raise AssertionError("torch memory is expected to be aligned to elements")
        views = format.views(self.blocks)
        for part, scale in (
            (views.up, format.hidden**-0.5),
            (views.down, format.inter**-0.5),
            (views.up_bias, 0.5),
            (views.down_bias, 0.5),
        ):
            if part is not None:
                part.copy_(torch.randn(part.shape, generator=generator) * scale)
        self.views = views

    @property
    def addresses(self) -> np.ndarray:
        """uint64 [count]."""
        return self.blocks.data_ptr() + np.arange(self.count, dtype=np.uint64) * np.uint64(self.format.block_bytes)


def activate(format: ExpertFormat, first: torch.Tensor) -> torch.Tensor:
    """The activation of float64 [..., up_rows] -> [..., inter]."""
    kind, alpha, limit = format.activation.kind, format.activation.alpha, format.activation.limit
    if format.gated:
        gate = torch.clamp(first[..., : format.inter], max=limit)
        up = torch.clamp(first[..., format.inter :], min=-limit, max=limit)
    else:
        gate, up = torch.clamp(first, min=-limit, max=limit), torch.ones((), dtype=first.dtype)
    if kind is ActivationKind.SWIGLU_OAI:
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    if kind is ActivationKind.SILU:
        return gate * torch.sigmoid(gate) * up
    if kind is ActivationKind.GELU:
        return gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up
    if kind is ActivationKind.GELU_TANH:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return gate * 0.5 * (1 + torch.tanh(inner)) * up
    if kind is ActivationKind.RELU2:
        return torch.relu(gate) ** 2 * up
    raise AssertionError(kind)


def first_rows_outputs(
    experts: Experts, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, expert: int, rows: int
) -> torch.Tensor:
    """The other side's part of a divided expert: float64 [T, hidden], rows of the inner width before ``rows``."""
    out = torch.zeros(hidden.shape[0], experts.format.hidden, dtype=torch.float64)
    if not 0 <= expert < experts.count:
        return out
    first = hidden.double() @ experts.views.up[expert].double().T
    if experts.views.up_bias is not None:
        first += experts.views.up_bias[expert].double()
    inner = activate(experts.format, first)[:, :rows]
    share = (weights.double() * (ids == expert)).sum(dim=1, keepdim=True)
    return share * (inner @ experts.views.down[expert].double()[:, :rows].T)


def expert_outputs(
    experts: Experts, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the engine has to compute, and the size of what was summed: both float64 [T, hidden].

    The second bounds rounding errors: they grow with the absolute values that were summed, not with the result, in
    which terms may cancel. Activations count as one more than they are, because the first projection of weights of
    this scale rounds like a number near one.
    """
    format = experts.format
    out = torch.zeros(hidden.shape[0], format.hidden, dtype=torch.float64)
    size = torch.zeros_like(out)
    for t in range(hidden.shape[0]):
        for k in range(ids.shape[1]):
            expert = int(ids[t, k])
            if not 0 <= expert < experts.count:
                continue
            first = experts.views.up[expert].double() @ hidden[t].double()
            if experts.views.up_bias is not None:
                first += experts.views.up_bias[expert].double()
            inner = activate(format, first)
            down = experts.views.down[expert].double()
            second = down @ inner
            second_size = down.abs() @ (inner.abs() + 1)
            if experts.views.down_bias is not None:
                second += experts.views.down_bias[expert].double()
                second_size += experts.views.down_bias[expert].double().abs()
            out[t] += weights[t, k].double() * second
            size[t] += weights[t, k].double().abs() * second_size
    return out, size
