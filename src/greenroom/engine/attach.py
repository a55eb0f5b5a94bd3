"""Puts offloaded experts into a transformers model: the modules that stand in, and the step hooks."""

import threading
from typing import Any

import numpy as np
import torch
from torch import nn

from greenroom.engine.spec import ExpertLayerSpec
from greenroom.experts.layer import OffloadedExperts
from greenroom.experts.manager import OffloadManager


class RoutedExperts(nn.Module):
    """Stands where a family's experts module stood; has no parameters of its own."""

    def __init__(self, spec: ExpertLayerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.num_experts = spec.num_experts
        self.offloaded: OffloadedExperts | None = None
        self.top_k: int | None = None  # choices a token, known once the layer has run

    @torch.compiler.disable  # the host decides where experts run, which cannot be traced
    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """hidden: [T, H] -> [T, H], as the family's own experts compute it."""
        if self.offloaded is None:
            raise RuntimeError(f"the experts of '{self.spec.name}' are not loaded, or the model was closed")
        self.top_k = top_k_index.shape[-1]
        return self.offloaded.forward(hidden, top_k_index, top_k_weights)

    def extra_repr(self) -> str:
        """Shown when the model is printed."""
        fmt = self.spec.format
        return f"experts={self.num_experts}, hidden={fmt.hidden}, inter={fmt.inter}, dtype={fmt.dtype}, offloaded"


def replace_experts(model: nn.Module, specs: tuple[ExpertLayerSpec, ...]) -> None:
    """Swaps every experts module for a ``RoutedExperts``; the weights that it declared are gone."""
    for spec in specs:
        parent, _, child = spec.name.rpartition(".")
        setattr(model.get_submodule(parent), child, RoutedExperts(spec))


def attach_manager(model: nn.Module, specs: tuple[ExpertLayerSpec, ...], manager: OffloadManager) -> None:
    """Gives each ``RoutedExperts`` its layer and makes every forward pass of the decoder one step."""
    for spec, layer in zip(specs, manager.layers, strict=True):
        experts = model.get_submodule(spec.name)
        assert isinstance(experts, RoutedExperts)
        experts.offloaded = layer
    decoder = model.get_submodule(specs[0].name.partition("layers.")[0].rstrip("."))
    hooks = _StepHooks(manager)
    decoder.register_forward_pre_hook(hooks.before, with_kwargs=True)
    decoder.register_forward_hook(hooks.after, with_kwargs=True, always_call=True)


def detach(model: nn.Module, specs: tuple[ExpertLayerSpec, ...]) -> None:
    """Leaves the model without experts: running it is an error from here on."""
    for spec in specs:
        experts = model.get_submodule(spec.name)
        assert isinstance(experts, RoutedExperts)
        experts.offloaded = None


class _StepHooks:
    """Opens a step before the decoder runs and closes it behind, also when the decoder fails.

    A runner whose layers need no host opens and closes steps itself.
    """

    def __init__(self, manager: OffloadManager) -> None:
        self._manager = manager
        self._owner: int | None = None

    @torch.compiler.disable
    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._manager.runs_without_host:
            return
        if self._owner == threading.get_ident():
            # This thread's last pass was interrupted (Ctrl-C): torch calls no hooks behind that.
            self._owner = None
            self._manager.abandon_step()
        self._manager.begin_step(_valid_rows(args, kwargs))
        self._owner = threading.get_ident()

    @torch.compiler.disable
    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # This also runs behind an exception (without an output), and even where begin_step refused
        # because another thread's step is running: that one is not ours to close.
        if self._owner != threading.get_ident():
            return
        self._owner = None
        if output is None:
            self._manager.abandon_step()
        else:
            self._manager.end_step()


def _valid_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> np.ndarray | None:
    """bool [batch * new tokens]: rows of a prefill that are no padding; None if all are, or nothing says so.

    From a CUDA device it arrives without a wait: its values are there once a layer's routing has been read.
    """
    mask = kwargs.get("attention_mask")
    tokens = next((t for t in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args) if t is not None), None)
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or tokens is None or tokens.shape[1] == 1:
        return None
    valid = (mask[:, -tokens.shape[1] :] != 0).reshape(-1)
    on_host: np.ndarray = valid.to("cpu", non_blocking=True).numpy()
    return on_host
