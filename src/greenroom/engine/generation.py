"""generate: text from a loaded model, with its speed."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from greenroom.engine.cache_argument import cache_argument
from greenroom.engine.decode_loop import DecodeLoop, can_run_graph
from greenroom.engine.detokenize import TokenText
from greenroom.engine.growing_cache import make_cache
from greenroom.errors import ConfigError

OnText = Callable[[str], None]


@dataclass(frozen=True)
class Generation:
    """One generated text.

    Attributes:
        text: what was generated, without special tokens.
        token_ids: the generated tokens, with the end token if the model ended.
        prompt_tokens: tokens of the prompt.
        prefill_seconds: from the call until the first token.
        prepare_seconds: between the first token and the second, to make the decode graph. 0 if there is none, or
            if one that an earlier call made could be used again.
        decode_seconds: from the first token until the last, without ``prepare_seconds``.
        prefill_tok_s: prompt tokens a second until the first token.
        decode_tok_s: tokens a second after the first one. None when there is only one.
        decode: "graph" if the tokens after the first came from CUDA graphs, each a step of all layers; "eager" if the
            host decided layer by layer.
        eager_because: why it was eager, None for "graph".
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    prefill_seconds: float
    prepare_seconds: float
    decode_seconds: float
    prefill_tok_s: float | None
    decode_tok_s: float | None
    decode: str
    eager_because: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"token_ids": list(self.token_ids)}


def check_request(
    prompt: str | Sequence[int],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> None:
    """Checks all of a request that can be checked without a model.

    Raises:
        ConfigError: a prompt that is empty or no Unicode text, or a number outside its range.
    """
    if len(prompt) == 0:
        raise ConfigError("the prompt is empty; give at least one word")
    if isinstance(prompt, str):
        check_text(prompt, "the prompt")
    if max_tokens < 1:
        raise ConfigError(f"max_tokens must be at least 1, not {max_tokens}")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature must be 0 or more, not {temperature}")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be above 0 and at most 1, not {top_p}")
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise ConfigError(f"seed must be between -2^63 and 2^64 - 1, not {seed}")


def check_text(text: str, what: str) -> None:
    """
    Raises:
        ConfigError: bytes that are no characters are in ``text``, as a shell or a pipe may hand them on.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is not valid UTF-8; convert it") from error


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[int],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    on_text: OnText | None = None,
    graph: bool = True,
) -> Generation:
    """Continues ``prompt`` by up to ``max_tokens`` tokens, through the model's own ``generate``.

    On a GPU, each token after the first is one CUDA graph, where the model allows it.

    Args:
        prompt: text, or token ids that are passed on as they are.
        temperature: 0 takes the likeliest token. Above 0, all tokens of the ``top_p`` mass take part.
        seed: of the sampler. torch's own generators are left as they were when it is given.
        on_text: called with each piece of text as soon as its last character is certain. The pieces
            add up to the result's text.
        graph: False decodes layer by layer in any case.

    Raises:
        ConfigError: an empty prompt, one that does not fit the model, or a number outside its range.
    """
    check_request(prompt, max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    ids = list(tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else list(prompt)
    _check_fit(model, ids, max_tokens)
    input_ids = torch.tensor([ids], dtype=torch.long, device=model.device)
    config = _generation_config(model, tokenizer, max_tokens, temperature, top_p)
    recorder = _Recorder(tokenizer, on_text)
    eager_because = _why_eager(model, max_tokens, graph)
    loop = DecodeLoop.of(model) if eager_because is None else None
    run = model.generate if loop is None else loop.generate
    cache = _cache(model, config) if loop is None else {}
    # Not inference_mode: buffers that grow meanwhile are written outside of it as well.
    with torch.no_grad(), _seeded(seed, model.device):
        start = time.perf_counter()
        mask = torch.ones_like(input_ids)
        run(input_ids, attention_mask=mask, generation_config=config, streamer=recorder, **cache)
    prepare_seconds = 0.0 if loop is None else loop.prepare_seconds
    prefill_seconds = recorder.first - start
    decode_seconds = recorder.last - recorder.first - prepare_seconds
    return Generation(
        text=recorder.text,
        token_ids=tuple(recorder.token_ids),
        prompt_tokens=len(ids),
        prefill_seconds=prefill_seconds,
        prepare_seconds=prepare_seconds,
        decode_seconds=decode_seconds,
        prefill_tok_s=_rate(len(ids), prefill_seconds),
        decode_tok_s=_rate(len(recorder.token_ids) - 1, decode_seconds),
        decode="eager" if loop is None else "graph",
        eager_because=eager_because,
    )


def context_length(model: PreTrainedModel) -> int | None:
    """Tokens that the model's context holds, or None if its configuration does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_context(wanted: int, known: int | None) -> None:
    """
    Raises:
        ConfigError: more tokens than the model's context, as far as that is ``known``, holds.
    """
    if known is not None and wanted > known:
        raise ConfigError(f"the model's context holds {known} tokens; ask for at most so many, not {wanted}")


def _why_eager(model: PreTrainedModel, max_tokens: int, graph: bool) -> str | None:
    """None if decode goes through graphs."""
    if not graph:
        return "it was asked for"
    if max_tokens == 1:
        return "one token needs no decode step"
    return can_run_graph(model)


def _check_fit(model: PreTrainedModel, ids: Sequence[int], max_tokens: int) -> None:
    if not ids:
        raise ConfigError("the prompt is empty once tokenized; give at least one word")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise ConfigError(
            f"the prompt has token ids outside the model's vocabulary of {vocabulary}: "
            "the tokenizer belongs to another model"
        )
    limit = context_length(model)
    if limit is None:
        return
    if len(ids) >= limit:
        raise ConfigError(
            f"the prompt has {len(ids)} tokens, but the model's context holds {limit}: shorten the prompt to "
            f"{limit - 1} tokens at most"
        )
    if len(ids) + max_tokens > limit:
        raise ConfigError(
            f"the prompt's {len(ids)} tokens and {max_tokens} new ones do not fit the model's context of {limit}: "
            f"ask for at most {limit - len(ids)}, or shorten the prompt"
        )


def _cache(model: PreTrainedModel, config: GenerationConfig) -> dict[str, DynamicCache]:
    """The argument of ``generate`` that brings a cache; none where a checkpoint names a kind of its own."""
    if config.cache_implementation is not None or not isinstance(model, PreTrainedModel):
        return {}
    return {cache_argument(model): make_cache(model)}


def _generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_tokens: int, temperature: float, top_p: float
) -> Any:
    """The model's own generation settings (its end tokens above all) with the request's on top."""
    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens = max_tokens
    config.max_length = None
    config.num_beams = 1
    config.num_return_sequences = 1
    config.return_dict_in_generate = False
    config.do_sample = temperature > 0
    # Only what was asked for narrows the choice, not what the checkpoint's author would have liked. Values
    # that do nothing, since generate fills a None with the checkpoint's value again.
    config.temperature = temperature if config.do_sample else 1.0
    config.top_p = top_p
    config.top_k = 0 if config.do_sample else 50  # unused; any other value draws a warning
    config.min_p = 0.0 if config.do_sample else None
    config.typical_p = 1.0
    config.epsilon_cutoff = config.eta_cutoff = 0.0
    if config.pad_token_id is None:
        # A batch of one is never padded, but generate warns when it has no token to do it with.
        config.pad_token_id = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return config


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None


class _Recorder(BaseStreamer):
    """Notes when tokens come, and hands their text on once it can no longer change.

    ``generate`` passes the prompt first, then each token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: OnText | None) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.first = self.last = 0.0
        self._pieces = TokenText(tokenizer)
        self._on_text = on_text
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.last = time.perf_counter()
        if not self.token_ids:
            self.first = self.last
        tokens = value.reshape(-1).tolist()
        self.token_ids += tokens
        self._hand_on(self._pieces.add(tokens))

    def end(self) -> None:
        self._hand_on(self._pieces.end())

    def _hand_on(self, piece: str) -> None:
        self.text += piece
        if piece and self._on_text is not None:
            self._on_text(piece)
