"""What requests of a server wait for: their tokens alone, together, and while a long prompt arrives."""

import gc
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from transformers import PreTrainedModel

from greenroom.bench.byte_tokenizer import byte_tokenizer
from greenroom.bench.result import LayersResult, offload_labels
from greenroom.bench.serving_client import Client
from greenroom.bench.shapes import shape_config
from greenroom.bench.synthetic import override_routing, random_model
from greenroom.config import OffloadConfig
from greenroom.engine.generation import check_context
from greenroom.engine.offload import close, offload_of
from greenroom.engine.sizes import BUCKETS, KV_BLOCK
from greenroom.errors import ConfigError
from greenroom.serving.engine import ServingEngine
from greenroom.serving.open import open_engine

_PROMPT = 100
"""Tokens of the prompts of those that decode."""

_STRETCHES = 5
_WARM_UP = 16
"""Tokens of each request before anything is timed."""

_EXTRA_TOKENS = 1024
"""Of each request that decodes while a prompt arrives: those for which it need not go on, but must not end."""

_SPARE_BLOCKS = 8


@dataclass(frozen=True, kw_only=True)
class ServingBenchmark(LayersResult):
    """As clients see it, who get a token when the engine delivers it.

    value: milliseconds, the longest gap between two tokens of any of ``requests`` that decode while a prompt of
    ``tokens`` tokens arrives; median of ``repeats``. bound: ``pass_ms + quiet_gap_ms``.
    worst_gap_ms: the longest of them all. first_token_ms: from that prompt's arrival to its first token; median.
    decode_tok_s, quiet_gap_ms: tokens a second of all, and the longest gap, while nothing arrives; medians of five
    stretches of ``steps`` tokens each. worst_quiet_gap_ms: the longest of all five.
    single_tok_s: tokens a second of one request alone.
    pass_ms: to the first token of a prompt of ``max_step_tokens`` tokens, all that one pass takes, alone; median.
    """

    worst_gap_ms: float
    first_token_ms: float
    decode_tok_s: float
    single_tok_s: float
    quiet_gap_ms: float
    worst_quiet_gap_ms: float
    pass_ms: float
    requests: int
    max_step_tokens: int
    steps: int


def bench_serving(
    shape: str,
    requests: int,
    tokens: int,
    knobs: OffloadConfig,
    routing: str = "uniform",
    max_step_tokens: int = 2048,
    steps: int = 32,
    repeats: int = 3,
) -> ServingBenchmark:
    """
    Args:
        requests: that decode together, from prompts of 100 tokens.
        tokens: of the prompt that arrives meanwhile.
        max_step_tokens: tokens of one pass, as for ``serve``.
        steps: tokens of each request in a stretch.
        repeats: prompts that arrive, one at a time.

    Raises:
        ConfigError: numbers or a shape that make no sense.
        MemoryLimitError: memory does not suffice.
    """
    config, load = shape_config(shape), _Load(requests, tokens, max_step_tokens, steps)
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, not {repeats}")
    check_context(load.context, config.get_text_config().max_position_embeddings)
    model = random_model(config, knobs)
    try:
        override_routing(model, routing)
        with _opened(model, load) as engine:
            measured = _measure(engine, load, repeats)
        offload = offload_of(model)
        return ServingBenchmark(
            bench="serving",
            shape=shape,
            batch=requests,
            tokens=tokens,
            routing=routing,
            unit="ms",
            requests=requests,
            max_step_tokens=max_step_tokens,
            steps=steps,
            repeats=repeats,
            **offload_labels(offload),
            **measured,
        )
    finally:
        close(model)


def longest_gap(streams: Sequence[Sequence[float]], start: float, end: float) -> float:
    """The longest time between two tokens of one request, of those gaps of which some part lies within the bounds.

    Args:
        streams: when each request got its tokens, in order.
    """
    pairs = (pair for times in streams for pair in pairwise(times))
    return max(after - before for before, after in pairs if after > start and before < end)


@dataclass(frozen=True)
class _Load:
    """What is asked of the engine; see ``bench_serving``.

    Raises:
        ConfigError: numbers that make no sense.
    """

    requests: int
    tokens: int
    max_step_tokens: int
    steps: int

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= BUCKETS[-1]:
            raise ConfigError(f"--requests must be 1 to {BUCKETS[-1]}, not {self.requests}")
        for name, value in (("--tokens", self.tokens), ("--steps", self.steps)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.max_step_tokens <= self.requests:
            raise ConfigError(f"--max-step-tokens must be more than --requests, not {self.max_step_tokens}")

    @property
    def quiet_tokens(self) -> int:
        """Of each request while nothing arrives; of the first and the last of them nothing is timed."""
        return _STRETCHES * self.steps + 2 * _WARM_UP

    @property
    def busy_tokens(self) -> int:
        """Of each request while a prompt arrives, at most."""
        chunks = -(-self.tokens // (self.max_step_tokens - self.requests))
        return _WARM_UP + chunks + _EXTRA_TOKENS

    @property
    def decoding(self) -> int:
        """Tokens of a sequence that decodes, at most."""
        return _PROMPT + max(self.quiet_tokens, self.busy_tokens)

    @property
    def context(self) -> int:
        """Tokens of any sequence, at most."""
        return max(self.tokens + 1, self.max_step_tokens + 1, self.decoding)

    @property
    def num_blocks(self) -> int:
        """Of the KV cache, for all sequences at once."""
        lengths = [self.context] + [self.decoding] * self.requests
        return sum(-(-length // KV_BLOCK) for length in lengths) + _SPARE_BLOCKS


@contextmanager
def _opened(model: PreTrainedModel, load: _Load) -> Iterator[ServingEngine]:
    engine = open_engine(
        model,
        byte_tokenizer(),
        num_blocks=load.num_blocks,
        block_size=KV_BLOCK,
        max_context=load.context,
        max_step_tokens=load.max_step_tokens,
        max_sequences=load.requests + 1,
    )
    # As in ``serve``: a collection that looks through the whole model stops every request.
    gc.collect()
    gc.freeze()
    try:
        yield engine
    finally:
        gc.unfreeze()
        engine.close()


def _measure(engine: ServingEngine, load: _Load, repeats: int) -> dict[str, Any]:
    """Fields of the result."""
    draw = random.Random(0)

    def prompt(tokens: int) -> list[int]:
        return draw.choices(range(engine.vocabulary), k=tokens)

    own = [prompt(_PROMPT) for _ in range(load.requests)]
    for each in own:
        _first_token_s(engine, each)  # found in the KV cache later, so that all begin together
    single, together = _quiet(engine, own[:1], load), _quiet(engine, own, load)
    # One more of each comes first, untimed: it loads what the others find.
    passes = [_first_token_s(engine, prompt(load.max_step_tokens)) for _ in range(repeats + 1)][1:]
    arrivals = [_arrival(engine, own, prompt(load.tokens), load) for _ in range(repeats + 1)][1:]
    pass_ms, quiet_gap_ms = statistics.median(passes) * 1e3, statistics.median(together.gaps) * 1e3
    return {
        "value": statistics.median(each.gap for each in arrivals) * 1e3,
        "bound": pass_ms + quiet_gap_ms,
        "worst_gap_ms": max(each.gap for each in arrivals) * 1e3,
        "first_token_ms": statistics.median(each.first_token for each in arrivals) * 1e3,
        "decode_tok_s": statistics.median(together.rates),
        "single_tok_s": statistics.median(single.rates),
        "quiet_gap_ms": quiet_gap_ms,
        "worst_quiet_gap_ms": max(together.gaps) * 1e3,
        "pass_ms": pass_ms,
    }


@dataclass(frozen=True)
class _Quiet:
    """Of each stretch: tokens a second of all requests, and the longest gap in seconds."""

    rates: list[float]
    gaps: list[float]


def _quiet(engine: ServingEngine, prompts: list[list[int]], load: _Load) -> _Quiet:
    """Requests for ``prompts`` together, while nothing arrives."""
    clients = [Client(engine, prompt, load.quiet_tokens) for prompt in prompts]
    for client in clients:
        client.wait_for_end()
    streams = [client.times for client in clients]
    every = sorted(time for times in streams for time in times)
    bounds = [every[len(prompts) * (_WARM_UP + number * load.steps)] for number in range(_STRETCHES + 1)]
    stretches = [*pairwise(bounds)]
    return _Quiet(
        [len(prompts) * load.steps / (end - start) for start, end in stretches],
        [longest_gap(streams, start, end) for start, end in stretches],
    )


@dataclass(frozen=True)
class _Arrival:
    """Seconds: the longest gap between two tokens of the others; to the newcomer's first token."""

    gap: float
    first_token: float


def _arrival(engine: ServingEngine, own: list[list[int]], prompt: list[int], load: _Load) -> _Arrival:
    """``prompt`` arrives while requests for ``own`` decode."""
    others = [Client(engine, each, load.busy_tokens) for each in own]
    for client in others:
        client.wait_for(_WARM_UP)
    newcomer = Client(engine, prompt, max_tokens=1)
    newcomer.wait_for_end()
    first = newcomer.times[0]
    for client in others:
        client.wait_for(len(client.times) + 2)  # or the gap in which the first token comes has no end
    for client in others:
        client.cancel()
    for client in others:
        client.wait_for_end()
    return _Arrival(longest_gap([client.times for client in others], newcomer.started, first), first - newcomer.started)


def _first_token_s(engine: ServingEngine, prompt: list[int]) -> float:
    client = Client(engine, prompt, max_tokens=1)
    client.wait_for_end()
    return client.times[0] - client.started
