"""KV blocks in host memory behind a serving engine, with a trained model: the same tokens, less prefill."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import greenroom
from greenroom.errors import ConfigError, MemoryLimitError
from greenroom.kv.config import KVOffloadConfig
from greenroom.serving.engine import ServingEngine
from greenroom.serving.open import open_engine
from greenroom.serving.requests import Finished, Piece, SamplingParams
from tests.engine.offloaded import offloaded, random_ids, save_family
from tests.reference.tokenizer import make_tokenizer

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "tiny-moe"
BLOCK = 16
CONTEXT = 160
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
BLOCK_BYTES = 8 * 2 * BLOCK * 2 * 32 * 4  # layers, keys and values, tokens, heads, width, float32


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def loaded(tmp_path_factory, request) -> Iterator[tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
    """In float32, so that a token does not depend on what else a pass computes."""
    folder = tmp_path_factory.mktemp("tiny-moe")
    AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(FOLDER).save_pretrained(folder)
    model, tokenizer = greenroom.load(folder, progress=False, cache_expert_num=4, device=request.param)
    yield model, tokenizer
    greenroom.close(model)


@contextmanager
def opened(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase], kv_offload: KVOffloadConfig | None, num_blocks: int = 12
) -> Iterator[ServingEngine]:
    engine = open_engine(
        *loaded, num_blocks=num_blocks, block_size=BLOCK, max_context=CONTEXT, max_sequences=4, kv_offload=kv_offload
    )
    try:
        yield engine
    finally:
        engine.close()


class Answer:
    """The events of one request."""

    def __init__(self, engine: ServingEngine, prompt: list[int]) -> None:
        self._events: queue.Queue = queue.Queue()
        engine.submit(prompt, GREEDY, self._events.put)

    def wait(self) -> tuple[list[int], Finished]:
        tokens: list[int] = []
        while isinstance(event := self._events.get(timeout=60), Piece):
            tokens += event.token_ids
        assert isinstance(event, Finished), event
        return tokens, event


def prompts(tokenizer: PreTrainedTokenizerBase, count: int, length: int) -> list[list[int]]:
    """Pieces of one text, each of so many tokens."""
    text = (FOLDER / "README.md").read_text()
    ids = tokenizer(text * 3, add_special_tokens=False).input_ids
    return [ids[start * 7 : start * 7 + length] for start in range(count)]


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("factor", [1, 2])
def test_an_evicted_prefix_comes_back(loaded, factor: int, policy: str) -> None:
    first, *others = prompts(loaded[1], 4, 121)
    with opened(loaded, None, num_blocks=60) as engine:
        expected, _ = Answer(engine, first).wait()  # everything is computed
    with opened(loaded, KVOffloadConfig(64 * BLOCK_BYTES, factor, policy)) as engine:
        tokens, finished = Answer(engine, first).wait()
        assert (tokens, finished.cached_tokens) == (expected, 0)
        for other in others:  # push it out of the device's 12 blocks
            Answer(engine, other).wait()
        assert engine.stats().loaded_tokens == 0
        tokens, finished = Answer(engine, first).wait()
        assert tokens == expected
        # 120 tokens may be reused, 7 whole blocks and half a one; in pairs, 6 blocks.
        found, whole, loaded_blocks = {1: (120, 7, 8), 2: (96, 6, 6)}[factor]
        assert finished.cached_tokens == found
        assert engine.stats().loaded_tokens == found
        stats = engine.stats()
        assert stats.prompt_tokens == 5 * 121
        assert (stats.kv_offload.hit_blocks, stats.kv_offload.load.blocks) == (whole, loaded_blocks)
        assert stats.kv_offload.store.nbytes >= 4 * loaded_blocks * BLOCK_BYTES


def test_a_prompt_of_whole_blocks_comes_back_but_for_its_last_token(loaded) -> None:
    first, *others = prompts(loaded[1], 4, 112)
    with opened(loaded, KVOffloadConfig(64 * BLOCK_BYTES)) as engine:
        expected, _ = Answer(engine, first).wait()
        for other in others:
            Answer(engine, other).wait()
        tokens, finished = Answer(engine, first).wait()
        assert (tokens, finished.cached_tokens) == (expected, 111)
        assert engine.stats().loaded_tokens > 111 - 2 * BLOCK


def test_a_chat_goes_on_where_it_ended(loaded) -> None:
    """On the device and from host memory, each turn computes what is new and the last token of the answer before."""
    first, *others = prompts(loaded[1], 4, 90)
    for away in (False, True):
        with opened(loaded, KVOffloadConfig(64 * BLOCK_BYTES)) as engine:
            answer, _ = Answer(engine, first).wait()
            if away:
                for other in others:
                    Answer(engine, other).wait()
            turn = [*first, *answer, *others[0][:5]]
            tokens, finished = Answer(engine, turn).wait()
            assert finished.cached_tokens == 97  # 90 and 8, but for the last one
            assert (engine.stats().loaded_tokens > 97 - 2 * BLOCK) is away
        with opened(loaded, None) as engine:
            assert Answer(engine, turn).wait()[0] == tokens


def test_without_offload_it_is_computed_again(loaded) -> None:
    first, *others = prompts(loaded[1], 4, 121)
    with opened(loaded, None) as engine:
        for prompt in (first, *others):
            Answer(engine, prompt).wait()
        _, finished = Answer(engine, first).wait()
        assert finished.cached_tokens == engine.stats().loaded_tokens == 0


@pytest.mark.parametrize(("factor", "policy"), [(1, "arc"), (3, "lru")])
def test_many_requests_with_shared_beginnings_get_what_they_get_alone(loaded, factor: int, policy: str) -> None:
    """Small pools on both sides: blocks are stored, evicted and loaded all the time."""
    rng = np.random.default_rng(factor)
    heads = prompts(loaded[1], 3, 65)
    tails = prompts(loaded[1], 12, 40)
    work = [heads[rng.integers(3)] + tails[rng.integers(12)][: rng.integers(1, 40)] for _ in range(24)]
    with opened(loaded, None, num_blocks=400) as engine:
        expected = [Answer(engine, prompt).wait()[0] for prompt in work]
    with opened(loaded, KVOffloadConfig(20 * BLOCK_BYTES, factor, policy), num_blocks=14) as engine:
        answers = []
        for start in range(0, len(work), 6):
            answers += [answer.wait() for answer in [Answer(engine, prompt) for prompt in work[start : start + 6]]]
        assert [tokens for tokens, _ in answers] == expected
        assert engine.stats().loaded_tokens > 0


def test_what_cannot_be_offloaded_is_refused(loaded, tmp_path: Path) -> None:
    save_family("qwen3_next", tmp_path)  # linear attention keeps a state, not keys and values
    with offloaded(tmp_path, device="cpu") as model, pytest.raises(ConfigError, match="not made of blocks"):
        open_engine(model, loaded[1], kv_offload=KVOffloadConfig("1MB"))
    with pytest.raises(ConfigError, match="does not hold one block"), opened(loaded, KVOffloadConfig(1000)):
        pass
    with pytest.raises(MemoryLimitError, match="--kv-offload"), opened(loaded, KVOffloadConfig("900TB")):
        pass


def test_latents_come_back(tmp_path: Path) -> None:
    """Keys and values of different widths, or latents in their place."""
    save_family("deepseek_v3", tmp_path)
    first, *others = [random_ids(1, 70, seed)[0].tolist() for seed in range(4)]
    with offloaded(tmp_path, device="cpu") as model:
        loaded = model, make_tokenizer()
        with opened(loaded, None, num_blocks=40) as engine:
            expected, _ = Answer(engine, first).wait()
        with opened(loaded, KVOffloadConfig("8MiB")) as engine:
            for prompt in (first, *others):
                Answer(engine, prompt).wait()
            tokens, finished = Answer(engine, first).wait()
            assert tokens == expected
            assert finished.cached_tokens >= 4 * BLOCK
            assert engine.stats().loaded_tokens >= 3 * BLOCK
