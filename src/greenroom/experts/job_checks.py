"""What the native engine takes on trust of a job's tensors, checked before it gets them."""

import numpy as np
import torch

from greenroom.experts.formats import ExpertFormat


def check_job(
    format: ExpertFormat,
    experts: np.ndarray,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
) -> tuple[int, int]:
    """Tokens and experts per token, after checking everything that the native side takes on trust."""
    if experts.dtype != np.uint64 or experts.ndim != 1 or not experts.flags.c_contiguous:
        raise ValueError(f"experts must be contiguous uint64 [E], not {experts.dtype} {experts.shape}")
    if ids.ndim != 2:
        raise ValueError(f"ids must be [tokens, top_k], not {tuple(ids.shape)}")
    tokens, top_k = ids.shape
    check_tensor("ids", ids, torch.int32, (tokens, top_k))
    check_tensor("weights", weights, torch.float32, (tokens, top_k))
    check_tensor("hidden", hidden, format.dtype, (tokens, format.hidden))
    check_tensor("out", out, torch.float32, (tokens, format.hidden))
    return tokens, top_k


def check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """
    Raises:
        ValueError: another dtype, shape, device or stride.
    """
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {dtype} {shape}, not {tensor.dtype} {tuple(tensor.shape)}")
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"{name} must be a contiguous CPU tensor")
