"""What a model will need at run time, from its configuration alone: found by running it without any numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel

from greenroom.engine.attach import RoutedExperts, replace_experts
from greenroom.engine.cache_argument import cache_argument, why_no_plain_cache
from greenroom.engine.inspect import inspect_model
from greenroom.engine.spec import ModelSpec
from greenroom.errors import UnsupportedModelError
from greenroom.weights.select import WeightInfo


@dataclass(frozen=True)
class KvLayer:
    """What one layer remembers of a sequence.

    token_bytes: of each token. window: only the last so many are kept, None for all. state_bytes: whatever the length.
    """

    token_bytes: int
    window: int | None
    state_bytes: int

    def bytes_of(self, tokens: int) -> int:
        """Of a sequence of ``tokens``."""
        return self.state_bytes + self.token_bytes * min(tokens, self.window or tokens)


@dataclass(frozen=True)
class ModelShape:
    """
    Attributes:
        top_k: experts a token chooses, one entry an expert layer.
        kv: one entry a layer that remembers anything.
        num_layers: decoder layers, with experts or without.
        hidden, vocabulary: widths.
        max_context: tokens that the model takes, None if its configuration does not say.
        plain_cache: it remembers keys and values of all tokens in every layer, and nothing else.
    """

    spec: ModelSpec
    top_k: tuple[int, ...]
    kv: tuple[KvLayer, ...]
    num_layers: int
    hidden: int
    vocabulary: int
    max_context: int | None
    plain_cache: bool

    @property
    def has_states(self) -> bool:
        """Whether it remembers more than keys and values, so that decode cannot be a CUDA graph."""
        return any(layer.state_bytes for layer in self.kv)

    @property
    def dense_bytes(self) -> int:
        """Of weights, other than experts, that a token meets: all but an embedding table, of which it reads a row."""
        tables = [weight.nbytes for weight in self.spec.weights if self._is_table(weight)]
        return sum(weight.nbytes for weight in self.spec.weights) - sum(tables) + max(tables, default=0)

    @property
    def layer_weights(self) -> int:
        """Values of those weights outside of embedding and head."""
        return sum(prod(weight.shape) for weight in self.spec.weights if not self._is_table(weight))

    def kv_bytes(self, tokens: int) -> int:
        """Of one sequence."""
        return sum(layer.bytes_of(tokens) for layer in self.kv)

    def _is_table(self, weight: WeightInfo) -> bool:
        return len(weight.shape) == 2 and weight.shape[0] == self.vocabulary


def probe_shape(config: PretrainedConfig, dtype: torch.dtype) -> ModelShape:
    """Builds the model on the meta device, where nothing is allocated, and runs one token through it past its experts.

    Raises:
        UnsupportedModelError: greenroom does not run the model, or its forward pass needs real numbers.
    """
    text = config.get_text_config()
    with torch.device("meta"), torch.no_grad():
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except ValueError as error:
            raise UnsupportedModelError(f"transformers has no text model for '{config.model_type}': {error}") from error
        spec = inspect_model(model)
        replace_experts(model, spec.layers)
        experts = [module for module in model.modules() if isinstance(module, RoutedExperts)]
        for module in experts:
            module.forward = _Past(module)
        cache = DynamicCache(config=model.config)
        ids = torch.zeros(1, 1, dtype=torch.long)
        try:
            model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            raise UnsupportedModelError(
                f"what '{config.model_type}' remembers cannot be found out without its weights: {error}"
            ) from error
    return ModelShape(
        spec,
        tuple(module.top_k or 1 for module in experts),
        tuple(_describe(layer) for layer in cache.layers),
        _count_layers(model, spec),
        text.hidden_size,
        text.vocab_size,
        getattr(text, "max_position_embeddings", None),
        why_no_plain_cache(model) is None,
    )


class _Past:
    """Stands in for a layer's experts: notes how many a token chose, and hands the rows on."""

    def __init__(self, module: RoutedExperts) -> None:
        self._module = module

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self._module.top_k = ids.shape[-1]
        return hidden


def _count_layers(model: PreTrainedModel, spec: ModelSpec) -> int:
    return len(model.get_submodule(spec.decoder).layers)


def _describe(layer: Any) -> KvLayer:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    growing = [tensor for tensor in (keys, values) if isinstance(tensor, torch.Tensor)]
    token_bytes = sum(tensor.numel() * tensor.element_size() for tensor in growing)
    state = {id(t): t.numel() * t.element_size() for t in _tensors(vars(layer)) if t.ndim > 1}
    for tensor in growing:
        state.pop(id(tensor), None)
    return KvLayer(token_bytes, getattr(layer, "sliding_window", None), sum(state.values()))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All inside dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
