"""Real vLLM engines, in this process unless a test says otherwise."""

import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

PROMPT_LENGTHS = (3, 5, 17, 40, 70)


@dataclass(frozen=True)
class Run:
    """Greedy tokens of each prompt, and what the plugin counted (None without it)."""

    tokens: list[list[int]]
    stats: dict[str, Any] | None


@contextmanager
def engine(model: Any, **arguments: Any):
    """An ``LLM`` that computes in float32 unless told otherwise, closed behind the block."""
    from vllm import LLM

    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "skip_tokenizer_init": True}
    llm = LLM(model=str(model), **(settings | arguments))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def greedy(
    llm: Any, vocabulary: int = 256, tokens: int = 16, lengths: tuple[int, ...] = PROMPT_LENGTHS
) -> list[list[int]]:
    """Greedy continuations of the same random prompts every time."""
    from vllm import SamplingParams

    source = random.Random(3)
    prompts = [{"prompt_token_ids": [source.randrange(3, vocabulary) for _ in range(n)]} for n in lengths]
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, sampling, use_tqdm=False)]


def run(model: Any, vocabulary: int = 256, **arguments: Any) -> Run:
    """Starts an engine, lets it generate twice (the second time with a cache that has learnt), and closes it."""
    with engine(model, **arguments) as llm:
        tokens = greedy(llm, vocabulary) + greedy(llm, vocabulary)
        plugged = llm.llm_engine.vllm_config.additional_config.get("moe_offload") is not None
        stats = llm.collective_rpc("moe_offload_stats")[0] if plugged else None
    return Run(tokens, stats)


def offload(slots: int, **more: Any) -> dict[str, Any]:
    """Arguments of an engine with offloading."""
    return {"additional_config": {"moe_offload": {"cache_expert_num": slots, "context_num_threads": 2, **more}}}
