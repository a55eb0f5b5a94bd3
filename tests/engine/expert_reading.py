"""Reading experts in tests: specs, tensors and stores of small sizes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from greenroom.engine.checkpoint import Checkpoint
from greenroom.engine.expert_keys import place_experts
from greenroom.engine.expert_reader import read_experts
from greenroom.engine.spec import ExpertLayerSpec, ModelSpec
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.store import HostStore

E, H, I = 5, 6, 4  # noqa: E741 (experts, hidden, inter)
STEM = "model.layers.{}.mlp.experts"
SILU = Activation(ActivationKind.SILU)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def make_spec(dtype: torch.dtype = torch.bfloat16, layers: int = 2, **changes) -> ModelSpec:
    layout = {key: changes.pop(key) for key in ("transposed", "interleaved") if key in changes}
    fmt = ExpertFormat(H, I, dtype, SILU, **changes)
    return ModelSpec(tuple(ExpertLayerSpec(STEM.format(n), n, E, fmt, **layout) for n in range(layers)), 0, dtype)


@contextmanager
def loaded(folder: Path, spec: ModelSpec, threads: int = 4, progress=None) -> Iterator[HostStore]:
    with (
        Checkpoint.open(folder) as checkpoint,
        HostStore([layer.format for layer in spec.layers], [layer.num_experts for layer in spec.layers]) as store,
    ):
        for layer in range(len(store)):
            store.blocks(layer).fill_(0xA5)
        read_experts(checkpoint, place_experts(checkpoint.tensors, spec), spec, store, progress, threads)
        yield store


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(bits(found), bits(expected))


def per_expert_tensors(dtype: torch.dtype, layers: int = 2) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    return {
        f"{STEM.format(n)}.{e}.{name}.weight": torch.randn(shape).to(dtype)
        for n in range(layers)
        for e in range(E)
        for name, shape in shapes.items()
    }


def random_bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bit pattern: infinities, denormals, NaNs with payloads."""
    size = dtype.itemsize
    tensor = torch.randint(0, 256, (*shape, size), dtype=torch.uint8).view(dtype).squeeze(-1).clone()
    flat = tensor.view(-1).view({2: torch.int16, 4: torch.int32}[size])
    signalling = {torch.bfloat16: 0x7F81, torch.float16: 0x7C01, torch.float32: 0x7F800001}[dtype]
    flat[:: max(1, flat.numel() // 7)] = signalling
    return tensor
