"""Time to the first token of a long prompt whose prefix is in host memory, on the device, or nowhere."""

import queue
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from greenroom.bench.byte_tokenizer import byte_tokenizer
from greenroom.bench.result import LayersResult, offload_labels
from greenroom.bench.shapes import shape_config
from greenroom.bench.synthetic import override_routing, random_model
from greenroom.config import OffloadConfig
from greenroom.engine.offload import close, offload_of
from greenroom.engine.sizes import KV_BLOCK
from greenroom.errors import ConfigError, EngineError
from greenroom.kv.config import KVOffloadConfig
from greenroom.serving.engine import ServingEngine
from greenroom.serving.open import open_engine
from greenroom.serving.requests import Failed, Finished, SamplingParams

_SPARE_BLOCKS = 8
_LIMIT_S = 300.0
_QUIET_S = 0.2
"""Between two requests: stores of the one before have ended."""


@dataclass(frozen=True, kw_only=True)
class KvPrefixBenchmark(LayersResult):
    """One request at a time, from ``submit`` to its first token.

    value: milliseconds with all of the prompt but its last token in host memory. recomputed_ms: with nothing of it
    anywhere; on_device_ms: with all of it but that on the device. Medians of ``repeats``.
    speedup: ``recomputed_ms / value``. loaded_tokens: of each loaded prompt.
    """

    recomputed_ms: float
    on_device_ms: float
    speedup: float
    loaded_tokens: int
    max_step_tokens: int


def bench_kv_prefix(
    shape: str,
    tokens: int,
    knobs: OffloadConfig,
    routing: str = "uniform",
    max_step_tokens: int = 4096,
    repeats: int = 5,
) -> KvPrefixBenchmark:
    """The device's KV cache holds one such prompt, host memory all of them.

    Raises:
        ConfigError: numbers or a shape that make no sense.
        MemoryLimitError: memory does not suffice.
    """
    if tokens < 2 * KV_BLOCK or repeats < 1:
        raise ConfigError(f"--tokens must be at least {2 * KV_BLOCK}, and repeats at least 1")
    model = random_model(shape_config(shape), knobs)
    try:
        override_routing(model, routing)
        offload = offload_of(model)
        prompts = torch.randint(
            0, model.config.vocab_size, (repeats + 1, tokens), generator=torch.Generator().manual_seed(0)
        ).tolist()
        engine = open_engine(
            model,
            byte_tokenizer(),
            num_blocks=-(-(tokens + 1) // KV_BLOCK) + _SPARE_BLOCKS,
            block_size=KV_BLOCK,
            max_context=tokens + 1,
            max_step_tokens=max_step_tokens,
            max_sequences=4,
            kv_offload=KVOffloadConfig(2 * len(prompts) * tokens * _token_bytes(model.config)),
        )
        try:
            _ms(engine, prompts[-1][: 2 * KV_BLOCK])  # warms up
            recomputed = [_ms(engine, prompt) for prompt in prompts]
            on_device = [_ms(engine, prompts[-1]) for _ in range(repeats)]
            before = engine.stats().loaded_tokens
            loaded = [_ms(engine, prompt) for prompt in prompts[:-1]]
            loaded_tokens = (engine.stats().loaded_tokens - before) // repeats
        finally:
            engine.close()
        if loaded_tokens < tokens - 2 * KV_BLOCK:
            raise EngineError(f"of {tokens} tokens only {loaded_tokens} came from host memory")
        value, again = statistics.median(loaded), statistics.median(recomputed[1:])
        return KvPrefixBenchmark(
            bench="kv-prefix",
            shape=shape,
            batch=1,
            tokens=tokens,
            routing=routing,
            value=value,
            unit="ms",
            recomputed_ms=again,
            on_device_ms=statistics.median(on_device),
            speedup=again / value,
            loaded_tokens=loaded_tokens,
            max_step_tokens=max_step_tokens,
            repeats=repeats,
            **offload_labels(offload),
        )
    finally:
        close(model)


def _token_bytes(config: Any) -> int:
    """Of keys and values in BF16."""
    return config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * torch.bfloat16.itemsize


def _ms(engine: ServingEngine, prompt: list[int]) -> float:
    """Milliseconds to the only token of the output."""
    events: queue.Queue[Any] = queue.Queue()
    started = time.perf_counter()
    engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True), events.put)
    first = last = events.get(timeout=_LIMIT_S)
    seconds = time.perf_counter() - started
    while not isinstance(last, (Finished, Failed)):
        last = events.get(timeout=_LIMIT_S)
    if isinstance(last, Failed) or first is last:
        raise last.error if isinstance(last, Failed) else EngineError("a request ended without a token")
    time.sleep(_QUIET_S)
    return seconds * 1e3
