"""generate through a runner: the tokens of transformers' own loop, whatever samples and stops them."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from greenroom.engine import decode_loop, generation
from greenroom.engine.decode_loop import DecodeLoop, can_run_graph, why_not_captured
from greenroom.engine.generation import generate
from greenroom.engine.offload import close, offload_of
from greenroom.engine.paged.probe import Kept, PagedModel
from greenroom.errors import ConfigError, EngineError
from tests.engine.offloaded import Streamer, left_padded, offloaded, random_ids, saved_family
from tests.reference.families import FAMILIES, make_model
from tests.reference.tokenizer import VOCAB, make_tokenizer

pytest.importorskip("triton")

from greenroom.engine import step_runner

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EAGER = ("qwen3_next", "nemotron_h")
"""Families with linear attention."""


class PlainRunner:
    """A runner that is the model itself, run anew over all tokens of every step.

    Attributes:
        under_way: whether a step has been started and not waited for. steps: how many were started.
    """

    made = 0
    runs_ahead = False

    def __init__(self, model: PreTrainedModel, rows: int, max_length: int) -> None:
        type(self).made += 1
        self.rows, self.max_length = rows, max_length
        self.usable, self.prepared, self.unflushed = True, False, False
        self.under_way, self.steps = 0, 0
        self._model = model

    def prefill(self, prompts: torch.Tensor, *, prepare: bool) -> torch.Tensor:
        assert self.usable
        assert not prepare
        assert prompts.shape[0] == self.rows
        assert self.under_way == 0
        self.unflushed, self._seen = True, prompts
        return self._logits()

    def prepare(self) -> None:
        self.prepared = True

    def start(self, ids: torch.Tensor) -> torch.Tensor:
        assert self.usable
        assert self.prepared
        assert ids.shape == (self.rows, 1)
        assert self._seen.shape[1] < self.max_length
        self._seen = torch.cat([self._seen, ids], 1)
        self.under_way, self.steps = int(self.runs_ahead), self.steps + 1
        return self._logits()

    def wait(self) -> None:
        self.under_way = 0

    def discard(self) -> None:
        self.under_way, self.unflushed = 0, False

    def close(self) -> None:
        self.usable = False

    def _logits(self) -> torch.Tensor:
        return self._model(self._seen).logits[:, -1]


class AheadRunner(PlainRunner):
    runs_ahead = True


@pytest.fixture(params=[PlainRunner, AheadRunner])
def plain(request, monkeypatch) -> type[PlainRunner]:
    monkeypatch.setattr(step_runner, "StepRunner", request.param)
    monkeypatch.setattr(request.param, "made", 0)
    return request.param


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("qwen3_moe")


@pytest.fixture
def loop(model, plain) -> DecodeLoop:
    return DecodeLoop(model)


OPTIONS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 0},
    "repetition penalty": {"do_sample": False, "repetition_penalty": 3.0},
    "no repeated pairs": {"do_sample": False, "no_repeat_ngram_size": 2},
    "at least so many": {"do_sample": False, "eos_token_id": list(range(60)), "min_new_tokens": 5, "pad_token_id": 0},
    "ends": {"do_sample": True, "eos_token_id": list(range(16)), "pad_token_id": 3},
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_and_stream_are_those_of_transformers(model, loop, name, rows):
    for seed in range(2):
        ids = random_ids(rows, 5, seed)
        results, streamers = [], []
        for run in (model.generate, loop.generate):
            # Only a single sequence can be streamed to a text streamer, but any to this one.
            streamers.append(Streamer())
            torch.manual_seed(seed)
            results.append(run(ids, streamer=streamers[-1], max_new_tokens=12, **OPTIONS[name]))
        assert torch.equal(*results)
        assert streamers[0].put_values == streamers[1].put_values
        assert streamers[1].ends == 1
        assert not loop._runner.unflushed
        assert loop._runner.under_way == 0


def test_sequences_that_end_early_are_padded(model, loop):
    options = {"do_sample": False, "pad_token_id": 2, "max_new_tokens": 12}
    ids = random_ids(3, 4)
    free = model.generate(ids, **options)[:, 4:]
    end = int(free[1, 2])
    assert end not in free[0], "the test needs a sequence that goes on"
    expected = model.generate(ids, eos_token_id=end, **options)
    assert (expected[1] == 2).any()
    assert torch.equal(loop.generate(ids, eos_token_id=end, **options), expected)


def test_prompts_of_different_lengths_are_refused(loop):
    with pytest.raises(ConfigError, match="equal length, without padding"):
        loop.generate(**{"input_ids": None} | left_padded(2, 5), max_new_tokens=4, do_sample=False)


def test_a_mask_that_hides_nothing_is_none(model, loop, monkeypatch):
    """Older versions of transformers pass it on, newer ones drop it."""
    real = model.generate

    def older(ids, *, custom_generate, **kwargs):
        def with_mask(*args, attention_mask=None, **inner):
            return custom_generate(*args, attention_mask=torch.ones_like(ids), **inner)

        return real(ids, custom_generate=with_mask, **kwargs)

    ids = random_ids(2, 5)
    expected = real(ids, max_new_tokens=6, do_sample=False)
    monkeypatch.setattr(model, "generate", older)
    assert torch.equal(loop.generate(ids, max_new_tokens=6, do_sample=False), expected)


def test_one_token_needs_no_step(loop):
    loop.generate(random_ids(1, 5), max_new_tokens=1, do_sample=False)
    assert not loop._runner.prepared
    assert loop.prepare_seconds == 0


# --- one runner for many calls


def run(loop: DecodeLoop, rows: int, length: int, count: int) -> PlainRunner:
    loop.generate(random_ids(rows, length), max_new_tokens=count, do_sample=False)
    return loop._runner


def test_a_runner_is_used_again_while_sequences_fit(loop, plain):
    first = run(loop, 1, 10, 20)
    assert first.max_length == 64
    assert loop.prepare_seconds > 0
    for length, count in ((44, 20), (1, 4), (60, 4)):
        assert run(loop, 1, length, count) is first
        assert loop.prepare_seconds == 0
    assert plain.made == 1


def test_an_outgrown_runner_makes_room_for_the_next_turns(loop, plain):
    first = run(loop, 1, 10, 54)
    second = run(loop, 1, 110, 10)
    assert not first.usable
    assert second.max_length == 192  # 120 and a quarter, in full 64s
    assert run(loop, 1, 180, 12) is second
    assert run(loop, 1, 250, 6).max_length == 256, "no more than the model's context, if that is enough"
    assert plain.made == 3


def test_another_number_of_rows_takes_another_runner(loop, plain):
    first = run(loop, 1, 10, 4)
    second = run(loop, 2, 10, 4)
    assert second is not first
    assert (first.usable, second.max_length, plain.made) == (False, 64, 2)


def test_a_runner_that_was_given_up_is_replaced(loop, plain, monkeypatch):
    def given_up(self, ids):
        self.usable = False
        raise EngineError("decode step 3: layer 0 has not been answered")

    with monkeypatch.context() as patch:
        patch.setattr(plain, "start", given_up)
        with pytest.raises(EngineError, match="step 3"):
            run(loop, 1, 10, 4)
    run(loop, 1, 10, 4)
    assert plain.made == 2


def test_tokens_are_handed_on_while_the_next_step_runs(loop, plain):
    """All but the first, which must not wait until the runner is prepared, and the last; each once the step that it
    comes from has been waited for. One step too many where the model ends before it must."""
    seen = []

    class Watching(Streamer):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            runner = loop._runner
            seen.append(None if runner is None else (runner.prepared, runner.steps, runner.under_way))

    ids = random_ids(1, 10)
    whole = loop.generate(ids, streamer=Watching(), max_new_tokens=5, do_sample=False)
    ahead = int(plain.runs_ahead)
    chosen = [(False, 0, 0), *((True, token + ahead, ahead) for token in (1, 2, 3)), (True, 4, 0)]
    assert seen[1:] == chosen
    assert loop._runner.steps == 4
    seen.clear()
    loop.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=int(whole[0, 12]), pad_token_id=0)
    assert loop._runner.steps == 4 + 2 + ahead


def test_an_interrupted_call_counts_its_steps_and_keeps_the_runner(loop, plain):
    class Interrupted(Streamer):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.put_values) == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.generate(random_ids(1, 10), streamer=Interrupted(), max_new_tokens=9, do_sample=False)
    assert not loop._runner.unflushed
    run(loop, 1, 10, 4)
    assert plain.made == 1


def test_closing_the_model_closes_the_runner(plain):
    with saved_family("qwen3_moe") as (_, folder), offloaded(folder, device="cpu") as model:
        loop = DecodeLoop.of(model)
        assert DecodeLoop.of(model) is loop
        runner = run(loop, 1, 5, 3)
        close(model)
        assert not runner.usable
        assert loop._runner is None
        close(model)


# --- which models


@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_can_be_captured(family):
    with saved_family(family) as (_, folder), offloaded(folder, device="cpu") as model:
        problem = why_not_captured(model)
        if family in EAGER:
            assert "keeps more than keys and values: " in problem
            assert "LinearAttention" in problem
        else:
            assert problem is None


def test_what_a_cache_holds_is_found_out_once(monkeypatch):
    with saved_family("gpt_oss") as (_, folder), offloaded(folder, device="cpu") as model:
        assert why_not_captured(model) is None
        monkeypatch.setattr(decode_loop, "probe", None)
        assert why_not_captured(model) is None


def test_attention_that_no_kernel_serves():
    with saved_family("gpt_oss") as (_, folder), offloaded(folder, device="cpu") as model:
        DecodeLoop.of(model)._kept = PagedModel((), Kept.OTHER)
        assert why_not_captured(model) == "attention of GptOssForCausalLM reads something else than what is cached"


def test_models_whose_forward_needs_the_host(monkeypatch):
    model = make_model("mixtral")
    with monkeypatch.context() as patch:
        patch.setattr(model.model.rotary_emb, "rope_type", "dynamic")
        assert "rotary frequencies (dynamic)" in why_not_captured(model)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "_can_compile_fullgraph", False)
        assert why_not_captured(model) == "the forward pass of MixtralForCausalLM needs the host"
    with monkeypatch.context() as patch:
        patch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
        assert why_not_captured(model) == "decode graphs need sdpa attention, not flash_attention_2"
    assert why_not_captured(model) is None


def test_a_gpu_cannot_read_what_is_not_page_locked():
    with saved_family("mixtral") as (_, folder), offloaded(folder, device="cpu") as model:
        offload = offload_of(model)
        object.__setattr__(offload, "device", torch.device("cuda"))  # whose store would be locked
        try:
            assert "memory that is not page-locked (pin_memory is off)" in can_run_graph(model)
            offload.manager.store._layers = [dataclasses.replace(x, locked=True) for x in offload.manager.store._layers]
            assert can_run_graph(model) is None
        finally:
            object.__setattr__(offload, "device", torch.device("cpu"))


def test_models_of_others_and_models_on_the_cpu():
    assert "was not loaded by greenroom" in can_run_graph(make_model("mixtral"))
    with saved_family("mixtral") as (_, folder), offloaded(folder, device="cpu") as model:
        assert can_run_graph(model) == "the model runs on the CPU, which has no graphs"


# --- greenroom's own generate


@pytest.fixture(scope="module")
def loaded():
    """An offloaded model and its tokenizer, on the GPU if there is one."""
    with saved_family("mixtral") as (_, folder):
        stock = make_model("mixtral")
        stock.resize_token_embeddings(VOCAB)
        stock.save_pretrained(folder)
        with offloaded(folder, cache_expert_num=2, device=DEVICE) as model:
            yield SimpleNamespace(stock=stock, model=model, tokenizer=make_tokenizer())


@pytest.fixture
def graphs_anywhere(monkeypatch):
    monkeypatch.setattr(generation, "can_run_graph", lambda model: None)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "top_p": 0.9, "seed": 3}])
def test_generate_gives_the_same_either_way(loaded, graphs_anywhere, options):
    manager = offload_of(loaded.model).manager
    results, used = [], []
    for graph in (False, True, True):
        pieces: list[str] = []
        manager.counters.reset()
        result = generate(loaded.model, loaded.tokenizer, "In a", 5, graph=graph, on_text=pieces.append, **options)
        assert "".join(pieces) == result.text
        results.append(result)
        total = manager.counters.total()
        used.append(total.hits + total.misses)
        manager.check_invariants()
    eager, first, second = results
    stock = generate(loaded.stock.to(DEVICE), loaded.tokenizer, "In a", 5, graph=False, **options)
    assert stock.token_ids == eager.token_ids == first.token_ids == second.token_ids
    assert used[0] == used[1] == used[2], "every step is counted, the last one too"
    assert (eager.decode, eager.eager_because) == ("eager", "it was asked for")
    assert (first.decode, first.eager_because) == ("graph", None)
    assert eager.prepare_seconds == second.prepare_seconds == 0
    for result in results:
        assert result.decode_seconds > 0
        assert result.decode_tok_s == pytest.approx(4 / result.decode_seconds)
    assert first.to_dict()["decode"] == "graph"


def test_a_single_token_is_no_decode(loaded, graphs_anywhere):
    result = generate(loaded.model, loaded.tokenizer, "ab", 1)
    assert (result.decode, result.eager_because) == ("eager", "one token needs no decode step")


@pytest.mark.cuda
def test_a_gpu_takes_graphs_by_itself(loaded):
    first, second = (generate(loaded.model, loaded.tokenizer, "In the beginning", 40) for _ in range(2))
    stock = generate(loaded.stock.to(DEVICE), loaded.tokenizer, "In the beginning", 40, graph=False)
    assert (first.decode, second.decode) == ("graph", "graph")
    assert first.token_ids == second.token_ids == stock.token_ids
    assert second.prepare_seconds == 0
    before = torch.cuda.get_rng_state()
    sampled = [
        generate(loaded.model, loaded.tokenizer, "abc", 20, temperature=1.5, seed=5, graph=graph)
        for graph in (True, False, True)
    ]
    assert len({result.token_ids for result in sampled}) == 1
    assert torch.equal(torch.cuda.get_rng_state(), before)
    # Its forward still serves others, outside of generate too.
    ids = random_ids(2, 9).to(DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, loaded.stock(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in EAGER])
def test_every_other_family_decodes_by_graph(family):
    with saved_family(family) as (stock, folder), offloaded(folder, cache_expert_num=3, device=DEVICE) as model:
        assert can_run_graph(model) is None
        ids = random_ids(3, 14).to(DEVICE)  # sliding windows are 16
        expected = stock.to(DEVICE).generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        got = DecodeLoop.of(model).generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert torch.equal(got, expected)
