"""Real vLLM engines, in this process unless a test says otherwise."""

import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

PROMPT_LENGTHS = (3, 5, 17, 40, 70)


@dataclass(frozen=True)
class Run:
    """Greedy tokens of each prompt, and what the plugin counted (None without it).

    likely: for each token the log probabilities of those that were likeliest in its place.
    """

    tokens: list[list[int]]
    stats: dict[str, Any] | None
    likely: list[list[dict[int, float]]]

    def margins(self, other: list[list[int]]) -> list[float]:
        """Of each text that parts from ``other``: by how much its own token was likelier, where they part."""
        found = []
        for tokens, theirs, likely in zip(self.tokens, other, self.likely, strict=True):
            at = next((i for i, pair in enumerate(zip(tokens, theirs, strict=True)) if pair[0] != pair[1]), None)
            if at is not None:
                found.append(likely[at][tokens[at]] - likely[at].get(theirs[at], float("-inf")))
        return found


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
    return [list(answer.token_ids) for answer in _answers(llm, vocabulary, tokens, lengths, logprobs=None)]


def _answers(llm: Any, vocabulary: int, tokens: int, lengths: tuple[int, ...], logprobs: int | None) -> list[Any]:
    from vllm import SamplingParams

    source = random.Random(3)
    prompts = [{"prompt_token_ids": [source.randrange(3, vocabulary) for _ in range(n)]} for n in lengths]
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=logprobs)
    return [out.outputs[0] for out in llm.generate(prompts, sampling, use_tqdm=False)]


def run(model: Any, vocabulary: int = 256, **arguments: Any) -> Run:
    """Starts an engine, lets it generate twice (the second time with a cache that has learnt), and closes it."""
    with engine(model, **arguments) as llm:
        answers = [answer for _ in range(2) for answer in _answers(llm, vocabulary, 16, PROMPT_LENGTHS, logprobs=5)]
        plugged = llm.llm_engine.vllm_config.additional_config.get("moe_offload") is not None
        stats = llm.collective_rpc("moe_offload_stats")[0] if plugged else None
    likely = [[{token: each.logprob for token, each in place.items()} for place in a.logprobs] for a in answers]
    return Run([list(answer.token_ids) for answer in answers], stats, likely)


def offload(slots: int, **more: Any) -> dict[str, Any]:
    """Arguments of an engine with offloading."""
    return {"additional_config": {"moe_offload": {"cache_expert_num": slots, "context_num_threads": 2, **more}}}
