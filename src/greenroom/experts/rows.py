"""What a model does with tokens between its products, by the native library in the calling thread."""

import torch

from greenroom.experts.native import DTYPES, Isa
from greenroom.kernels.cpu.library import load_library

ROW_DTYPES = (torch.bfloat16, torch.float32)
"""That these functions take. All tensors of a call have one of them, lie on the CPU and are contiguous."""


def norm(isa: Isa, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """``weight * (x / sqrt(mean(x^2) + epsilon))`` over the last dimension, the quotient rounded to x's dtype.

    Args:
        isa: one that this processor runs, not ``AUTO``.
        x: [..., W].
        weight: [W].

    Returns:
        As x.
    """
    out, width = torch.empty_like(x), weight.shape[0]
    load_library().gr_norm(
        isa, DTYPES[x.dtype], x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, epsilon
    )
    return out


def turn(isa: Isa, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding: ``x * cos + y * sin``, where y is x with its halves swapped and the first negated. In BF16 each
    step is rounded, as a model's own are.

    Args:
        x: [..., T, D], heads of T tokens.
        cos, sin: [..., T, D], the same for all heads.

    Returns:
        As x.
    """
    out, (tokens, width) = torch.empty_like(x), x.shape[-2:]
    load_library().gr_turn(
        isa,
        DTYPES[x.dtype],
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        x.numel() // (tokens * width),
        tokens,
        width,
    )
    return out


def choose(isa: Isa, logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top_k`` likeliest experts of each token, the likeliest first; of equally likely ones the first.

    Args:
        logits: [T, E], at most 1,024.
        top_k: at most 32.
        normalise: weights are divided by their sum.

    Returns:
        float32 [T, top_k], their shares of softmax(logits); int64 [T, top_k], their ids.
    """
    tokens, experts = logits.shape
    weights, ids = torch.empty(tokens, top_k), torch.empty(tokens, top_k, dtype=torch.int64)
    load_library().gr_choose(
        isa,
        DTYPES[logits.dtype],
        logits.data_ptr(),
        tokens,
        experts,
        top_k,
        normalise,
        weights.data_ptr(),
        ids.data_ptr(),
    )
    return weights, ids
