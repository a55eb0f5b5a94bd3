"""KV caches of transformers: what differs between supported versions, and between models."""

import inspect

from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer


def cache_argument(model: PreTrainedModel) -> str:
    """What this version of transformers calls the argument that takes a KV cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def why_no_plain_cache(model: PreTrainedModel) -> str | None:
    """None if keys and values of all tokens are all that ``model`` remembers, in every layer; otherwise why not."""
    dynamic, static = DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=1)
    others = {type(layer).__name__ for layer in dynamic.layers if type(layer) is not DynamicLayer}
    others |= {type(layer).__name__ for layer in static.layers if type(layer) is not StaticLayer}
    if not others:
        return None
    return f"decode graphs need a plain K/V cache, and {type(model).__name__} has {', '.join(sorted(others))}"
