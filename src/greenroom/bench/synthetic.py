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
from greenroom.engine.offload import offload_experts
from greenroom.engine.request import Request
from greenroom.errors import ConfigError
from greenroom.experts.layer import RunLayer
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
    weights = request.take_weights(model, spec)
    try:
        offload_experts(model, request, spec, plan, lambda store: fill_with_noise(store, seed), started, weights)
    except BaseException:
        weights.close()
        raise
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


def override_routing(model: PreTrainedModel, name: str) -> None:
    """Replaces the router's choices, so that the bytes moved are known, and any earlier replacement.

    Args:
        name: "own" keeps the model's; "uniform" draws distinct experts afresh for every token and layer;
            otherwise a .npy file of int [steps, layers, K], replayed from its beginning. With fewer choices
            a token than the model makes, only so many experts run.

    Raises:
        ConfigError: a trace that cannot be read or does not fit the model.
    """
    layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    for module in layers:
        vars(module).pop("forward", None)
    if name == "own":
        return
    table = _uniform(len(layers), layers[0].num_experts) if name == "uniform" else _read_trace(Path(name), len(layers))
    router = _Replay(table)
    for number, module in enumerate(layers):
        module.forward = _overridden(module, router, number)


def _overridden(module: RoutedExperts, router: "_Replay", layer: int) -> Callable[..., torch.Tensor]:
    forward = module.forward

    def with_routing(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        chosen = router(ids, layer, module.offloaded.run_instead if module.offloaded is not None else None)
        return forward(hidden, chosen, weights[:, : chosen.shape[1]])

    return with_routing


_UNIFORM_ROWS = 8192
"""Rows of a drawn table: more than a long prompt's tokens, and hundreds of decode steps before it repeats."""

_MOST_CHOICES = 16
"""Choices a token that a drawn table serves at most."""


def _uniform(num_layers: int, num_experts: int) -> np.ndarray:
    """int64 [rows, layers, experts]: each a random order of all experts, of which a token takes the first few."""
    keys = np.random.default_rng(0).random((_UNIFORM_ROWS, num_layers, num_experts), dtype=np.float32)
    return np.argsort(keys, axis=-1)[..., :_MOST_CHOICES]


def _read_trace(path: Path, num_layers: int) -> np.ndarray:
    try:
        trace = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"cannot read the routing trace '{path}': {error}") from error
    if trace.ndim != 3 or trace.shape[1] != num_layers or not np.issubdtype(trace.dtype, np.integer):
        raise ConfigError(f"the trace '{path}' must hold integers [steps, {num_layers} layers, choices a token]")
    return trace


class _Replay:
    """Gives tokens the rows of a table, one after another, each layer its own column.

    Where it stands is data on the device, so that a captured step goes on at each replay. Halves of a batch that run at
    once each go on from a place of their own, the second one's half a table away.
    """

    def __init__(self, table: np.ndarray) -> None:
        """table: int [rows, layers, choices]."""
        self._table = torch.from_numpy(table).permute(1, 0, 2).long().contiguous()
        self._next: list[torch.Tensor] = []
        self._who: list[RunLayer] = []  # paths without the host that have asked, in that order
        self._rows = torch.zeros(0, dtype=torch.long)

    def __call__(self, ids: torch.Tensor, layer: int, who: RunLayer | None = None) -> torch.Tensor:
        """
        Args:
            ids: as the model chose them, [T, K].
            who: runs the layers, if it is not the host. What it captures it has run before.

        Returns:
            int64 [T, K] to use instead.
        """
        if self._table.device != ids.device:
            self._table = self._table.to(ids.device)
        if self._table.shape[2] > ids.shape[1]:
            self._table = self._table[..., : ids.shape[1]].contiguous()
        if layer == 0:
            here, count = self._place(who), self._table.shape[1]
            self._rows = (here + torch.arange(len(ids), device=ids.device)) % count
            here.add_(len(ids))
        return self._table[layer].index_select(0, self._rows)

    def _place(self, who: RunLayer | None) -> torch.Tensor:
        """The next row for ``who``: the host and the first path, which never run at once, share theirs."""
        if who is not None and who not in self._who:
            self._who.append(who)
        number = 0 if who is None else self._who.index(who)
        while len(self._next) <= number:
            start = len(self._next) * (self._table.shape[1] // 2)
            self._next.append(torch.full((1,), start, dtype=torch.long, device=self._table.device))
        return self._next[number]
