"""What differs between supported versions of transformers."""

import inspect

from transformers import PreTrainedModel


def cache_argument(model: PreTrainedModel) -> str:
    """What this version of transformers calls the argument that takes a KV cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
