"""Models with random weights made in place, and routing that a benchmark chooses."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from greenroom.config import OffloadConfig
from greenroom.engine.attach import RoutedExperts, replace_experts
from greenroom.engine.inspect import inspect_model
from greenroom.engine.offload import Request, offload_experts
from greenroom.errors import ConfigError
from greenroom.experts.store import HostStore

_STD = 0.02


def random_model(config: PretrainedConfig, knobs: OffloadConfig, seed: int = 0) -> PreTrainedModel:
    """An offloaded model of ``config``'s shape in BF16; no checkpoint is read or written.

    Raises:
        GreenroomError: as ``greenroom.load``.
    """
    started = time.perf_counter()
    request = Request.check(knobs)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    spec = inspect_model(model)
    plan = request.plan(spec)
    replace_experts(model, spec.layers)
    model.to_empty(device=request.device)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=_STD) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
    # Its tables are buffers, which to_empty leaves undefined.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(request.device)
    offload_experts(model, request, spec, plan, lambda store: fill_with_noise(store, seed), started)
    return model


def fill_with_noise(store: HostStore, seed: int) -> None:
    """Gives every expert normal weights: a stretch of one pool, from a place of its own."""
    random = np.random.default_rng(seed)
    for layer, fmt in enumerate(store.formats):
        values = fmt.block_bytes // fmt.dtype.itemsize
        pool = torch.empty(values + (1 << 20)).normal_(std=_STD).to(fmt.dtype).view(torch.uint8)
        blocks = store.blocks(layer)
        for expert, start in enumerate(random.integers(0, 1 << 19, len(blocks))):
            offset = int(start) * 2
            blocks[expert].copy_(pool[offset : offset + fmt.block_bytes])


Router = Callable[[torch.Tensor, int], torch.Tensor]
"""(ids as the model chose them [T, K], layer) -> int64 [T, K] to use instead."""


def override_routing(model: PreTrainedModel, name: str) -> None:
    """Replaces the router's choices, so that the bytes moved are known.

    Args:
        name: "own" keeps the model's; "uniform" draws distinct experts afresh for every token and layer;
            otherwise a .npy file of int [steps, layers, K], replayed from its beginning.

    Raises:
        ConfigError: a trace that cannot be read or does not fit the model.
    """
    if name == "own":
        return
    layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    router = _uniform(layers[0].num_experts) if name == "uniform" else _replayed(Path(name), len(layers))
    for number, module in enumerate(layers):
        module.forward = _overridden(module.forward, router, number)  # type: ignore[method-assign]


def _overridden(forward: Callable[..., torch.Tensor], router: Router, layer: int) -> Callable[..., torch.Tensor]:
    def with_routing(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return forward(hidden, router(ids, layer), weights)

    return with_routing


def _uniform(num_experts: int) -> Router:
    def draw(ids: torch.Tensor, _layer: int) -> torch.Tensor:
        return torch.rand(len(ids), num_experts, device=ids.device).topk(ids.shape[1]).indices

    return draw


def _replayed(path: Path, num_layers: int) -> Router:
    try:
        trace = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"cannot read the routing trace '{path}': {error}") from error
    if trace.ndim != 3 or trace.shape[1] != num_layers or not np.issubdtype(trace.dtype, np.integer):
        raise ConfigError(f"the trace '{path}' must hold integers [steps, {num_layers} layers, choices a token]")
    on_device: dict[torch.device, torch.Tensor] = {}
    step = np.zeros(num_layers, dtype=np.int64)

    def replay(ids: torch.Tensor, layer: int) -> torch.Tensor:
        steps = on_device.setdefault(ids.device, torch.from_numpy(trace).long().to(ids.device))
        rows = (torch.arange(len(ids), device=ids.device) + int(step[layer])) % len(steps)
        step[layer] += len(ids)
        return steps[rows, layer][:, : ids.shape[1]]

    return replay
