"""SequenceRunner, alone and as generate's decode loop takes it: the tokens of transformers' own loop."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from greenroom.engine import decode_loop, generation
from greenroom.engine.decode_loop import DecodeLoop
from greenroom.engine.generation import generate
from greenroom.engine.offload import close, offload_of
from greenroom.engine.paged import sequence_runner
from greenroom.engine.paged.probe import PagedModel, probe
from greenroom.engine.paged.runner import PagedRunner
from greenroom.engine.paged.sequence_runner import SequenceRunner
from greenroom.errors import ConfigError, EngineError, MemoryLimitError
from tests.engine.offloaded import Streamer, offloaded, random_ids, saved_family
from tests.reference.tokenizer import make_tokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WINDOW = 16  # of gpt_oss and gemma4
OPTIONS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 0},
    "ends": {"do_sample": True, "eos_token_id": list(range(16)), "pad_token_id": 3},
}
Models = tuple[PreTrainedModel, PreTrainedModel]


@pytest.fixture(scope="module")
def gpt_oss() -> Iterator[Models]:
    """The stock model and the offloaded one."""
    with saved_family("gpt_oss") as (stock, folder), offloaded(folder, cache_expert_num=3, device=DEVICE) as model:
        yield stock.to(DEVICE), model


@pytest.fixture(scope="module", params=["gpt_oss", "gemma4", "deepseek_v2", "deepseek_v3"])
def models(request) -> Iterator[Models]:
    with saved_family(request.param) as (stock, folder), offloaded(folder, cache_expert_num=3, device=DEVICE) as model:
        yield stock.to(DEVICE), model


@pytest.fixture
def blocks_for_all(monkeypatch):
    """Latent attention has a plain cache as well, so a loop takes blocks only where it is told to."""
    monkeypatch.setattr(decode_loop, "why_no_plain_cache", lambda model: "asked for")


def make(model: PreTrainedModel, rows: int, max_length: int = 64, **options) -> SequenceRunner:
    kept = probe(model)
    assert isinstance(kept, PagedModel)
    return SequenceRunner(model, kept, rows, max_length, **options)


def ids_of(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return random_ids(rows, length, seed).to(DEVICE)


def compare(stock: PreTrainedModel, loop: DecodeLoop, ids: torch.Tensor, **options) -> None:
    """Both give the same tokens, and stream the same."""
    results, streamers = [], [Streamer(), Streamer()]
    for run, streamer in zip((stock.generate, loop.generate), streamers, strict=True):
        torch.manual_seed(1)
        results.append(run(ids, streamer=streamer, **options))
    assert torch.equal(*results)
    assert streamers[0].put_values == streamers[1].put_values
    assert streamers[1].ends == 1


# --- by generate's loop


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_and_stream_are_those_of_transformers(models, blocks_for_all, name, rows):
    stock, model = models
    loop = DecodeLoop(model)
    for seed in range(2):
        compare(stock, loop, ids_of(rows, WINDOW - 3, seed), max_new_tokens=WINDOW, **OPTIONS[name])
    assert isinstance(loop._runner, SequenceRunner)
    loop.close()
    offload_of(model).manager.check_invariants()


@pytest.mark.parametrize(("family", "rows"), [("gpt_oss", 3), ("gemma4", 1), ("deepseek_v3", 1)])
def test_steps_without_the_host(family, rows, blocks_for_all, monkeypatch):
    """As a GPU computes them; without one, by Triton's interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setattr(decode_loop, "SequenceRunner", partial(SequenceRunner, decode_path=True))
    with saved_family(family) as (stock, folder), offloaded(folder, cache_expert_num=3, device=DEVICE) as model:
        loop = DecodeLoop(model)
        compare(stock.to(DEVICE), loop, ids_of(rows, WINDOW - 1), max_new_tokens=4, do_sample=False)
        decode = loop._runner._runner._decode
        assert decode is not None
        assert list(decode._buckets) == ([1] if rows == 1 else [4, 2, 1])
        loop.close()
        offload_of(model).manager.check_invariants()


def test_sequences_that_end_early_are_padded(gpt_oss):
    stock, model = gpt_oss
    options = {"do_sample": False, "pad_token_id": 2, "max_new_tokens": 12}
    ids = ids_of(3, 4)
    free = stock.generate(ids, **options)[:, 4:]
    end = next(int(token) for token in free[1, 1:] if token not in free[0])
    expected = stock.generate(ids, eos_token_id=end, **options)
    assert (expected[1] == 2).any()
    loop = DecodeLoop(model)
    assert torch.equal(loop.generate(ids, eos_token_id=end, **options), expected)
    loop.close()


def test_a_runner_is_used_again_until_it_is_outgrown(gpt_oss):
    stock, model = gpt_oss
    loop = DecodeLoop(model)
    compare(stock, loop, ids_of(1, 10), max_new_tokens=20, do_sample=False)
    first = loop._runner
    assert first.max_length == 64
    assert loop.prepare_seconds > 0
    compare(stock, loop, ids_of(1, 30, 1), max_new_tokens=10, do_sample=False)
    assert loop._runner is first
    assert loop.prepare_seconds == 0
    compare(stock, loop, ids_of(1, 60, 2), max_new_tokens=10, do_sample=False)
    second = loop._runner
    assert (first.usable, second.usable, second.max_length) == (False, True, 128)
    compare(stock, loop, ids_of(2, 10, 3), max_new_tokens=4, do_sample=False)
    assert (second.usable, loop._runner.rows) == (False, 2)
    loop.close()


def test_a_runner_that_was_given_up_is_replaced(gpt_oss, monkeypatch):
    pytest.importorskip("triton")
    stock, model = gpt_oss
    monkeypatch.setattr(decode_loop, "SequenceRunner", partial(SequenceRunner, decode_path=True))
    loop = DecodeLoop(model)
    compare(stock, loop, ids_of(1, 5), max_new_tokens=2, do_sample=False)
    given_up = loop._runner

    def broken(*_args, **_others):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(given_up._runner._decode.hostless, "_wait_for", broken)
        with pytest.raises(KeyboardInterrupt):
            loop.generate(ids_of(1, 5), max_new_tokens=2, do_sample=False)
    assert not given_up.usable
    compare(stock, loop, ids_of(1, 5), max_new_tokens=2, do_sample=False)
    assert loop._runner is not given_up
    loop.close()


def test_closing_the_model_closes_the_runner():
    with saved_family("gpt_oss") as (_, folder), offloaded(folder, device=DEVICE) as model:
        loop = DecodeLoop.of(model)
        loop.generate(ids_of(1, 5), max_new_tokens=3, do_sample=False)
        runner = loop._runner
        close(model)
        assert not runner.usable
        assert loop._runner is None


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "top_p": 0.9, "seed": 3}])
def test_generate_gives_the_same_either_way(gpt_oss, monkeypatch, options):
    stock, model = gpt_oss
    monkeypatch.setattr(generation, "can_run_graph", lambda model: None)
    tokenizer, manager = make_tokenizer(), offload_of(model).manager
    results, used = [], []
    for graph in (False, True):
        manager.counters.reset()
        results.append(generate(model, tokenizer, list(range(4, 18)), 6, graph=graph, **options))
        used.append(manager.counters.total().hits + manager.counters.total().misses)
    expected = generate(stock, tokenizer, list(range(4, 18)), 6, graph=False, **options)
    assert expected.token_ids == results[0].token_ids == results[1].token_ids
    assert used[0] == used[1], "every step is counted, the last one too"
    assert [result.decode for result in results] == ["eager", "graph"]
    assert results[1].eager_because is None


def test_models_that_no_blocks_hold_are_refused():
    with (
        saved_family("qwen3_next") as (_, folder),
        offloaded(folder, device=DEVICE) as model,
        pytest.raises(ConfigError, match="keeps more than keys and values: LinearAttention"),
    ):
        DecodeLoop(model).generate(ids_of(1, 5), max_new_tokens=3, do_sample=False)


# --- alone


@torch.no_grad()
def test_long_prompts_take_several_passes(models, monkeypatch):
    """In pieces of about the same size, so that none is so short that it would be a decode step."""
    stock, model = models
    monkeypatch.setattr(sequence_runner, "_PASS_TOKENS", 20)
    runner, passes, run = make(model, 2), [], PagedRunner.run

    def counted(self, chunks, *others):
        passes.append([len(chunk.token_ids) for chunk in chunks])
        return run(self, chunks, *others)

    monkeypatch.setattr(PagedRunner, "run", counted)
    ids = ids_of(2, 21)
    logits = runner.prefill(ids, prepare=False)
    assert passes == [[7, 7]] * 3
    torch.testing.assert_close(logits, stock(ids).logits[:, -1], rtol=1e-3, atol=1e-4)
    logits = runner.step(ids[:, :1])
    ids = torch.cat([ids, ids[:, :1]], 1)
    torch.testing.assert_close(logits, stock(ids).logits[:, -1], rtol=1e-3, atol=1e-4)
    runner.close()


@torch.no_grad()
def test_a_prompt_of_one_token(gpt_oss):
    stock, model = gpt_oss
    runner, ids = make(model, 2), ids_of(2, 1)
    logits = runner.prefill(ids)
    assert runner.prepared
    torch.testing.assert_close(logits, stock(ids).logits[:, -1], rtol=1e-3, atol=1e-4)
    runner.close()


def test_what_does_not_fit(gpt_oss):
    _, model = gpt_oss
    for rows in (0, 33):
        with pytest.raises(ConfigError, match=f"1 to 32 sequences, not {rows}"):
            make(model, rows)
    runner = make(model, 2, 6)
    for rows, length in ((1, 3), (2, 6), (2, 0)):
        with pytest.raises(ConfigError, match=r"takes \[2, < 6\] prompt tokens"):
            runner.prefill(ids_of(rows, length))
    runner.prefill(ids_of(2, 5))
    runner.step(ids_of(2, 1))
    with pytest.raises(ConfigError, match="KV cache of 6 tokens is full"):
        runner.step(ids_of(2, 1))
    runner.close()


def test_sequences_of_a_pass_that_failed_are_lost(gpt_oss, monkeypatch):
    _, model = gpt_oss
    runner = make(model, 1)
    with pytest.raises(EngineError, match="no sequences to continue"):
        runner.step(ids_of(1, 1))
    runner.prefill(ids_of(1, 5))

    def broken(*_args, **_others):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(model.model.norm, "forward", broken)
        with pytest.raises(EngineError, match="no memory left"):
            runner.prefill(ids_of(1, 7))
    with pytest.raises(EngineError, match="no sequences to continue"):
        runner.step(ids_of(1, 1))
    runner.prefill(ids_of(1, 5))
    runner.close()
    for call in (lambda: runner.prefill(ids_of(1, 5)), lambda: runner.step(ids_of(1, 1))):
        with pytest.raises(EngineError, match=r"closed|no sequences"):
            call()


def test_a_gpu_without_memory_for_the_cache(gpt_oss, monkeypatch):
    def full(*_args, **_others):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(PagedRunner, "__init__", full)
    with pytest.raises(MemoryLimitError, match="no memory left for 2 x 64 tokens of KV cache"):
        make(gpt_oss[1], 2)


def test_a_runner_that_cannot_be_prepared_is_closed(gpt_oss, monkeypatch):
    runner = make(gpt_oss[1], 1)

    def broken(_self):
        raise EngineError("a pass failed")

    monkeypatch.setattr(PagedRunner, "prepare", broken)
    with pytest.raises(EngineError, match="a pass failed"):
        runner.prepare()
    assert not runner.usable
