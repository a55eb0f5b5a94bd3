"""From a request's fields to SamplingParams. Pure."""

from greenroom.server.errors import bad_request
from greenroom.server.schema import ChatRequest, Common, CompletionRequest
from greenroom.serving.requests import SamplingParams

_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions."""


def chat_params(request: ChatRequest, choice: int, defaults: SamplingParams) -> SamplingParams:
    """Of one choice. ``defaults`` hold where the request says nothing.

    Raises:
        ApiError: logit_bias is not for token ids.
    """
    limit = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    return _params(request, choice, limit, (request.top_logprobs or 0) if request.logprobs else None, defaults)


def completion_params(request: CompletionRequest, choice: int, defaults: SamplingParams) -> SamplingParams:
    """The same."""
    limit = _COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    return _params(request, choice, limit, request.logprobs, defaults)


def _params(
    request: Common, choice: int, max_tokens: int | None, logprobs: int | None, defaults: SamplingParams
) -> SamplingParams:
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(request.temperature, defaults.temperature),
        top_p=_or(request.top_p, defaults.top_p),
        top_k=_top_k(request.top_k, defaults.top_k),
        min_p=_or(request.min_p, defaults.min_p),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(request.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_or(request.frequency_penalty, defaults.frequency_penalty),
        # Choices of one request differ, and each is the same the next time.
        seed=None if request.seed is None else request.seed + choice,
        logit_bias=_biases(request.logit_bias or {}),
        stop=stop,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _top_k(value: int | None, default: int) -> int:
    """-1 is another way to say all tokens."""
    return default if value is None else 0 if value == -1 else value


def _biases(given: dict[str, float]) -> dict[int, float]:
    biases = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise bad_request(f"logit_bias: '{key[:64]}' is not a token id", "logit_bias")
        biases[int(key)] = bias
    return biases
