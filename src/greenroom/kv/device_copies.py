"""Copies of one KV block into another one, on the device that both are on."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from greenroom.kv.layouts import TensorLayout, block_layout

BlockCopy = Callable[[int, int], None]
"""``copy(source, target)``: enqueues a copy of all that the tensors keep of a block, on the current stream."""


def block_copy(tensors: Sequence[torch.Tensor]) -> BlockCopy:
    """
    Args:
        tensors: [blocks, ...] on one device, each block in one piece.
    """
    if tensors[0].device.type == "cuda":
        return _by_kernel(tensors)

    def copy(source: int, target: int) -> None:
        for tensor in tensors:
            tensor[target] = tensor[source]

    return copy


def _by_kernel(tensors: Sequence[torch.Tensor]) -> BlockCopy:
    """One launch for all tensors: they may be a hundred, and a request waits for it."""
    # Needs triton, which GPU builds of torch bring.
    from greenroom.kv.cuda_copies import RunTable

    layout = block_layout(tensors, [TensorLayout.BLOCKS_FIRST] * len(tensors))
    first = layout.device_addresses(tensors)
    table = RunTable(layout, first, layout.pitches, first, tensors[0].device)
    # A number of the kernel's arguments is read from the device: these lie there already, each on 16 bytes, as the
    # kernel would be compiled anew for another alignment.
    numbers = torch.from_numpy(np.arange(layout.num_blocks).repeat(2)).to(tensors[0].device).view(-1, 2)

    def copy(source: int, target: int) -> None:
        table.launch(numbers[source], numbers[target], 1)

    return copy
