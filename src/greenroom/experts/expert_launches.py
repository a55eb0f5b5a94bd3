"""Launches of the two GPU kernels that compute a batch's experts, one behind the other."""

from dataclasses import dataclass

import torch
import triton

from greenroom.experts.formats import ExpertFormat
from greenroom.kernels.gpu.expert_ffn import down_kernel, up_kernel
from greenroom.kernels.gpu.tiling import choose_tilings


@dataclass(frozen=True)
class Entries:
    """Experts to compute, on the device; one behind the other as ``dispatch_kernel`` lists them.

    address: int64 [entries], of each one's block. expert, rows: int32 [entries], its number, and how many rows of its
    inner width are computed. num: int32 [3], entries in all, those that cross PCIe, those to be copied.
    """

    address: torch.Tensor
    expert: torch.Tensor
    rows: torch.Tensor
    num: torch.Tensor


def launch_up(
    act: torch.Tensor,
    hidden: torch.Tensor,
    gpu_ids: torch.Tensor,
    top_k: int,
    entries: Entries,
    most: int,
    fmt: ExpertFormat,
    part: triton.language.constexpr,
) -> None:
    """First projection and activation.

    Args:
        act: written where a token chose an entry: of the experts' dtype, room for [most, T, inner width].
        hidden: [T, H] of the experts' dtype, contiguous.
        gpu_ids: int32, T * K choices that the GPU computes, -1 elsewhere.
        most: entries that the launch may have to compute.
        part: which entries, of ``expert_ffn``.
    """
    tokens, activation = len(hidden), fmt.activation
    tiling, _ = choose_tilings(tokens, fmt.dtype.itemsize)
    up, _, up_bias, _, _ = fmt.offsets
    up_kernel[(triton.cdiv(fmt.inter, tiling.rows), most)](
        act,
        hidden,
        gpu_ids,
        entries.address,
        entries.expert,
        entries.rows,
        entries.num,
        up,
        up_bias,
        activation.alpha,
        activation.limit,
        TOKENS=tokens,
        TOP_K=top_k,
        HIDDEN=fmt.hidden,
        INTER=fmt.inter,
        KIND=int(activation.kind),
        GATED=fmt.gated,
        BIAS=fmt.bias,
        CLAMPED=activation.limit != float("inf"),
        PART=part,
        WIDEN=hidden.device.type != "cuda",
        **tiling.arguments(),
    )


def launch_down(
    partial: torch.Tensor,
    act: torch.Tensor,
    gpu_ids: torch.Tensor,
    weights: torch.Tensor,
    entries: Entries,
    most: int,
    spans: torch.Tensor,
    fmt: ExpertFormat,
    part: triton.language.constexpr,
) -> None:
    """Second projection, weighted.

    Args:
        partial: written: float32, room for [T, K, H].
        act: what ``launch_up`` wrote.
        gpu_ids: as there.
        weights: floats [T, K].
        most: as there.
        spans: int64 [>= 3], the device's clock; on a GPU the end of what crosses PCIe is written.
        part: as there.
    """
    (tokens, top_k), on_gpu = weights.shape, act.device.type == "cuda"
    _, tiling = choose_tilings(tokens, fmt.dtype.itemsize)
    _, down, _, down_bias, _ = fmt.offsets
    down_kernel[(triton.cdiv(fmt.hidden, tiling.rows), most)](
        partial,
        act,
        gpu_ids,
        weights,
        entries.address,
        entries.expert,
        entries.rows,
        entries.num,
        spans,
        down,
        down_bias,
        TOKENS=tokens,
        TOP_K=top_k,
        HIDDEN=fmt.hidden,
        INTER=fmt.inter,
        BIAS=fmt.bias,
        TIMED=on_gpu,
        PART=part,
        WIDEN=not on_gpu,
        **tiling.arguments(),
    )
