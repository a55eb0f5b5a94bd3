"""open_engine with real models on the CPU: whatever runs beside a request, it gets what it gets alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import greenroom
from greenroom.engine.generation import generate
from greenroom.engine.paged.runner import PagedRunner
from greenroom.engine.runners import make_runner
from greenroom.errors import ConfigError, EngineError, MemoryLimitError
from greenroom.serving.engine import ModelFacts, ServingEngine
from greenroom.serving.open import end_tokens, open_engine
from greenroom.serving.requests import Finished, FinishReason, SamplingParams
from tests.engine.offloaded import saved_family
from tests.serving.gated import Client

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "tiny-moe"
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
GREEDY = {"temperature": 0, "max_tokens": 24}
WORDS = "king queen prophet shepherd servant daughter brother stranger river mountain city temple garden ship army word"
PROMPTS = [
    f"And it came to pass in those days, when the people were gathered together, that the {word}"
    for word in WORDS.split()
]


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    # Not the checkpoint's bfloat16: there two tokens may be equally likely, and rounding in a larger batch decides.
    model, tokenizer = greenroom.load(FOLDER, dtype="float32", progress=False, cache_expert_num=8, device="cpu")
    yield model, tokenizer
    greenroom.close(model)


@contextmanager
def opened(loaded: Loaded, **knobs) -> Iterator[ServingEngine]:
    engine = open_engine(*loaded, **({"num_blocks": 200, "max_context": 256, "max_step_tokens": 64} | knobs))
    try:
        yield engine
    finally:
        engine.close()


def ask(engine, tokenizer, prompt, **knobs) -> Client:
    client = Client()
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    client.handle = engine.submit(ids, SamplingParams(**(GREEDY | knobs)), client)
    return client


@pytest.fixture(scope="module")
def alone(loaded) -> dict[str, tuple[list[int], str]]:
    """Tokens and text of each prompt in an engine of its own, without a prefix of any other."""
    model, tokenizer = loaded
    results = {}
    runner = make_runner(model, max_tokens=64, max_context=256, num_blocks=16, max_sequences=1)
    facts = ModelFacts(model.config.vocab_size, 256, end_tokens(model, tokenizer), torch.device("cpu"))
    engine = ServingEngine(facts, tokenizer, runner, reuse=False)
    for prompt in PROMPTS:
        client = ask(engine, tokenizer, prompt)
        assert client.result().cached_tokens == 0
        results[prompt] = client.tokens, client.text
    engine.close()
    return results


class TestOnePrompt:
    @pytest.mark.parametrize("budget", [64, 512])
    def test_four_outputs_that_arrive_together_compute_it_once(self, loaded, budget) -> None:
        ids = (loaded[1](" ".join(PROMPTS))["input_ids"] * 2)[:300]
        with opened(loaded, max_context=400, max_step_tokens=budget) as engine:
            expected = ask(engine, loaded[1], ids)
            expected.result()
        with opened(loaded, max_context=400, max_step_tokens=budget) as engine:
            held, go = threading.Event(), threading.Event()

            def hold(_) -> None:
                held.set()
                assert go.wait(60)

            # The engine's thread stands still while they come, so that one pass admits all of them.
            engine.submit([5], SamplingParams(temperature=0, max_tokens=1), hold)
            assert held.wait(60)
            clients = [ask(engine, loaded[1], ids) for _ in range(4)]
            go.set()
            assert [client.result().cached_tokens for client in clients] == [0, 299, 299, 299]
            assert all(client.tokens == expected.tokens for client in clients)
            stats = engine.stats()
            assert stats.prompt_tokens - stats.cached_tokens == 1 + 300 + 3


class TestConcurrentRequests:
    def test_sixteen_get_what_each_gets_alone(self, loaded, alone) -> None:
        with opened(loaded) as engine:
            clients = [ask(engine, loaded[1], prompt) for prompt in PROMPTS]
            for client, prompt in zip(clients, PROMPTS, strict=True):
                client.result()
                assert (client.tokens, client.text) == alone[prompt]
            assert engine.stats().steps < 100

    def test_alone_is_what_transformers_generates(self, loaded, alone) -> None:
        for prompt in PROMPTS[:2]:
            assert alone[prompt][1] == generate(*loaded, prompt, GREEDY["max_tokens"], graph=False).text

    def test_a_second_time_out_of_the_cache(self, loaded, alone) -> None:
        with opened(loaded, max_sequences=1) as engine:
            for prompt in PROMPTS[:3] * 2:
                client = ask(engine, loaded[1], prompt)
                client.result()
                assert (client.tokens, client.text) == alone[prompt]
            assert client.last.cached_tokens == client.last.prompt_tokens - 1

    def test_too_few_blocks_for_all(self, loaded, alone) -> None:
        with opened(loaded, num_blocks=12, max_context=192) as engine:
            clients = [ask(engine, loaded[1], prompt) for prompt in PROMPTS[:10]]
            for client, prompt in zip(clients, PROMPTS, strict=False):
                client.result()
                assert (client.tokens, client.text) == alone[prompt]
            assert engine.stats().kv_blocks_used == 0 or engine.drain(10)

    def test_a_preempted_request(self, loaded) -> None:
        long = {"max_tokens": 100, "ignore_eos": True}
        with opened(loaded) as engine:
            expected = []
            for prompt in PROMPTS[:2]:
                client = ask(engine, loaded[1], prompt, **long)
                client.result()
                expected.append(client.tokens)
        with opened(loaded, num_blocks=12, max_context=192) as engine:
            clients = [ask(engine, loaded[1], prompt, **long) for prompt in PROMPTS[:2]]
            for client in clients:
                client.result()
            assert [client.tokens for client in clients] == expected
            assert engine.stats().preemptions == 1


class TestSampling:
    def test_a_seed_decides_whatever_runs_beside(self, loaded) -> None:
        warm = {"temperature": 1.2, "top_p": 0.95}
        with opened(loaded) as engine:
            single = ask(engine, loaded[1], PROMPTS[0], seed=5, **warm)
            single.result()
            crowd = [ask(engine, loaded[1], PROMPTS[0], seed=seed, **warm) for seed in (4, 5, 6, 5)]
            crowd += [ask(engine, loaded[1], prompt) for prompt in PROMPTS[:4]]
            for client in crowd:
                client.result()
        assert crowd[1].tokens == crowd[3].tokens == single.tokens
        assert crowd[0].tokens != single.tokens != crowd[2].tokens

    def test_stop_text(self, loaded, alone) -> None:
        tokens, text = alone[PROMPTS[0]]
        stop = text[len(text) // 2 : len(text) // 2 + 7]
        with opened(loaded) as engine:
            client = ask(engine, loaded[1], PROMPTS[0], stop=(stop,))
            assert client.result().reason == FinishReason.STOP
        assert client.text == text[: text.index(stop)]
        assert client.tokens == tokens[: len(client.tokens)]
        assert len(client.tokens) < len(tokens)

    def test_logprobs_of_the_model(self, loaded, alone) -> None:
        with opened(loaded) as engine:
            client = ask(engine, loaded[1], PROMPTS[0], logprobs=4, max_tokens=3)
            client.result()
        ids = loaded[1](PROMPTS[0])["input_ids"] + client.tokens[:2]
        with torch.no_grad():
            expected = loaded[0](torch.tensor([ids])).logits[0, -3:].log_softmax(-1)
        for row, logprob in zip(expected, client.logprobs, strict=True):
            assert logprob.logprob == pytest.approx(row[logprob.token_id].item(), abs=1e-3)
            assert [token for token, _ in logprob.top] == row.topk(4).indices.tolist()


def test_cancellation_gives_everything_back(loaded) -> None:
    with opened(loaded) as engine:
        clients = [ask(engine, loaded[1], prompt, max_tokens=200, ignore_eos=True) for prompt in PROMPTS]
        assert clients[0].began.wait(30)
        for client in clients:
            client.handle.cancel()
        assert {client.result().reason for client in clients} == {FinishReason.CANCELLED}
        assert engine.drain(30)
        stats = engine.stats()
        assert (stats.kv_blocks_used, stats.running, stats.waiting) == (0, 0, 0)


def test_a_model_whose_cache_is_not_made_of_blocks() -> None:
    with saved_family("qwen3_next") as (stock, folder):
        model, tokenizer = greenroom.load(folder, progress=False, device="cpu")
        try:
            with opened((model, tokenizer), num_blocks=None, max_context=64, max_step_tokens=8) as engine:
                prompts = [[10 + start + place for place in range(20)] for start in range(3)]
                clients = [ask(engine, tokenizer, prompt, max_tokens=6, ignore_eos=True) for prompt in prompts]
                for prompt, client in zip(prompts, clients, strict=True):
                    assert client.result() == Finished(FinishReason.LENGTH, 20, 6, 0)
                    ids = torch.tensor([prompt])
                    expected = stock.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
                    assert client.tokens == expected[0, 20:].tolist()
        finally:
            greenroom.close(model)


class TestOpening:
    def test_end_tokens(self, loaded) -> None:
        assert end_tokens(*loaded) == {2}

    def test_context_beyond_the_model(self, loaded) -> None:
        with pytest.raises(ConfigError, match="holds 2048 tokens"):
            open_engine(*loaded, num_blocks=200, max_context=4096)

    def test_a_cache_too_small_for_one_request(self, loaded) -> None:
        with pytest.raises(MemoryLimitError, match="256 tokens"):
            open_engine(*loaded, num_blocks=15, max_context=256)

    def test_nothing_stays_open_when_the_engine_is_refused(self, loaded, monkeypatch) -> None:
        closed = []
        real = greenroom.serving.open.make_runner

        def make(*args, **knobs):
            runner = real(*args, **knobs)
            monkeypatch.setattr(runner, "close", lambda: closed.append(runner))
            return runner

        monkeypatch.setattr("greenroom.serving.open.make_runner", make)
        with pytest.raises(ConfigError, match="max_waiting"):
            open_engine(*loaded, num_blocks=200, max_context=256, max_waiting=-1)
        assert len(closed) == 1


def test_decode_is_prepared_before_the_first_request(loaded, monkeypatch):
    """On a GPU the graphs are captured then; a model that cannot be prepared leaves nothing behind."""
    prepared: list[PagedRunner] = []
    monkeypatch.setattr(PagedRunner, "prepare", lambda runner: prepared.append(runner))
    with opened(loaded):
        assert len(prepared) == 1

    def failing(runner: PagedRunner) -> None:
        raise EngineError("no memory for graphs")

    closed: list[PagedRunner] = []
    monkeypatch.setattr(PagedRunner, "prepare", failing)
    monkeypatch.setattr(PagedRunner, "close", lambda runner: closed.append(runner))
    with pytest.raises(EngineError, match="no memory for graphs"):
        open_engine(*loaded, num_blocks=200, max_context=256)
    assert len(closed) == 1
