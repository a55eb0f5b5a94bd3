"""Whether a request's parameters make sense. Pure."""

import math
from collections.abc import Sequence

from greenroom.errors import ConfigError
from greenroom.serving.requests import SamplingParams

MAX_LOGPROBS = 20
MAX_STOPS = 16
_SEED_LIMIT = 2**63


def check_params(params: SamplingParams, vocabulary: int) -> None:
    """
    Args:
        vocabulary: width of the logits.

    Raises:
        ConfigError: a parameter outside its range; the sentence names both.
    """
    _check_range("temperature", params.temperature, 0, 2)
    _check_range("top_p", params.top_p, 0, 1)
    _check_range("min_p", params.min_p, 0, 1)
    _check_range("presence_penalty", params.presence_penalty, -2, 2)
    _check_range("frequency_penalty", params.frequency_penalty, -2, 2)
    _check_range("repetition_penalty", params.repetition_penalty, 0.01, 10)
    if params.top_p == 0:
        raise ConfigError("top_p must be above 0 and at most 1, not 0; for the likeliest token set temperature to 0")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise ConfigError(f"max_tokens must be at least 1, not {params.max_tokens}")
    if params.top_k < 0:
        raise ConfigError(f"top_k must be 0 (all tokens) or more, not {params.top_k}")
    if params.seed is not None and not -_SEED_LIMIT <= params.seed < _SEED_LIMIT:
        raise ConfigError(f"seed must be between -2^63 and 2^63 - 1, not {params.seed}")
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_LOGPROBS:
        raise ConfigError(f"logprobs must be between 0 and {MAX_LOGPROBS}, not {params.logprobs}")
    for token, bias in params.logit_bias.items():
        _check_token("logit_bias", token, vocabulary)
        _check_range(f"logit_bias of token {token}", bias, -100, 100)
    for token in params.stop_token_ids:
        _check_token("stop_token_ids", token, vocabulary)
    if len(params.stop) > MAX_STOPS:
        raise ConfigError(f"stop must have at most {MAX_STOPS} texts, not {len(params.stop)}")
    if "" in params.stop:
        raise ConfigError("stop must not have empty texts")


def check_prompt(prompt_ids: Sequence[int], params: SamplingParams, context_length: int, vocabulary: int) -> int:
    """
    Returns:
        Tokens that the output may have.

    Raises:
        ConfigError: the prompt is empty, not of this vocabulary, or too long together with ``max_tokens``.
    """
    prompt = len(prompt_ids)
    if not prompt:
        raise ConfigError("the prompt is empty; give at least one token")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocabulary:
        raise ConfigError(f"the prompt's token ids must be between 0 and {vocabulary - 1}")
    if prompt >= context_length:
        raise ConfigError(
            f"the prompt has {prompt} tokens, but prompt and output may have {context_length} together: "
            f"shorten the prompt to {context_length - 1} tokens at most"
        )
    room = context_length - prompt
    if params.max_tokens is None:
        return room
    if params.max_tokens > room:
        raise ConfigError(
            f"the prompt's {prompt} tokens and max_tokens of {params.max_tokens} are more than the {context_length} "
            f"that fit: ask for at most {room}, or shorten the prompt"
        )
    return params.max_tokens


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"{name} must be between {low:g} and {high:g}, not {value:g}")


def _check_token(name: str, token: int, vocabulary: int) -> None:
    if not 0 <= token < vocabulary:
        raise ConfigError(f"{name} must name tokens between 0 and {vocabulary - 1}, not {token}")
