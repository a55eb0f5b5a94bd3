"""Made-up weights for vLLM in seconds: a plugin of vLLM, named by ``vllm_engines.prepare_environment``."""

import zlib
from typing import Any

import torch

BLOCK = 8_388_593
"""Random values, used over and over: 16 MB in BF16. A prime, so that rows and experts begin at different ones."""

LARGEST = 1e-3
"""As in vLLM's own made-up weights."""


class Tiles:
    """Fills tensors with endless repetitions of one random block."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Integers are left alone. ``name`` says where in the block to begin: the same for all engines and ranks, so
        that their routers are alike."""
        if not tensor.is_floating_point():
            return
        target = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        flat, block = target.view(-1), self._block(tensor.device, tensor.dtype)
        done, start = 0, zlib.crc32(name.encode()) % BLOCK
        while done < flat.numel():
            length = min(BLOCK - start, flat.numel() - done)
            flat[done : done + length].copy_(block[start : start + length])
            done, start = done + length, 0
        if target is not tensor:
            tensor.copy_(target)

    def _block(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        if (device, dtype) not in self._blocks:
            generator = torch.Generator().manual_seed(1234)
            # The loader has set the model's device and dtype as torch's defaults.
            values = torch.empty(BLOCK, dtype=torch.float32, device="cpu")
            values.uniform_(-LARGEST, LARGEST, generator=generator)
            self._blocks[device, dtype] = values.to(device, dtype)
        return self._blocks[device, dtype]


def install_fast_dummy() -> None:
    """Replaces how vLLM's load format "dummy" fills a model: it draws each value anew, in 0.26 once for each module
    that a weight is inside of.

    Experts that the plugin offloads are not in the model's ``state_dict``; the plugin makes them up itself.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def load_weights(_loader: Any, model: torch.nn.Module, *_: Any, **__: Any) -> None:
        tiles = Tiles()
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tiles.fill(name, tensor)

    DummyModelLoader.load_weights = load_weights
