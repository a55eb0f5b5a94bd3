"""The way to copy KV blocks that a device takes."""

from collections.abc import Sequence

import torch

from greenroom.errors import ConfigError
from greenroom.kv.copies import BlockCopies, IndexCopies
from greenroom.kv.layouts import BlockLayout


def make_copies(
    layout: BlockLayout, tensors: Sequence[torch.Tensor], parts: torch.Tensor, way: str | None = None
) -> BlockCopies:
    """
    Args:
        way: one of ``cuda_copies.WAYS`` on a GPU; None for the default.

    Raises:
        ConfigError: an unknown way, or one that the driver does not have.
    """
    if tensors[0].device.type != "cuda":
        return IndexCopies(layout, tensors, parts)
    from greenroom.kv import cuda_copies  # needs triton

    way = way or cuda_copies.default_way()
    if way not in cuda_copies.available_ways():
        raise ConfigError(
            f"KV blocks can be copied by {', '.join(cuda_copies.available_ways())} on this machine, not '{way}'"
        )
    return cuda_copies.WAYS[way](layout, tensors, parts)
