"""By which of transformers' attention functions a model attends, for a while; and what they may be asked for."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PretrainedConfig


def configs_of(model: nn.Module) -> list[PretrainedConfig]:
    """The configurations that the modules of ``model`` look at, each once."""
    return list({id(module.config): module.config for module in model.modules() if hasattr(module, "config")}.values())


def attends_by(module: nn.Module) -> str:
    """The name of the function by which an attention module attends now."""
    config: Any = module.config
    name: str = config._attn_implementation
    return name


@contextmanager
def attention_named(configs: Iterable[PretrainedConfig], name: str) -> Iterator[None]:
    """Inside, models with these configurations attend through the function that is registered as ``name``."""
    before = [(config, config._attn_implementation) for config in configs]
    for config, _ in before:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def asks_for_more(dropout: float, others: dict[str, Any]) -> bool:
    """Whether a call wants more than softmax over scores, of the ``others`` that a function was given by name."""
    return bool(dropout) or any(others.get(name) is not None for name in ("position_bias", "softcap", "s_aux"))
