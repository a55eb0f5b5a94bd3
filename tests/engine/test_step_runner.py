"""StepRunner: its logits are those of stock transformers, and whatever goes wrong is said and leaves the model usable.

Without a GPU, Triton's interpreter runs the kernels: slowly, so models are tiny and steps few.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from greenroom.engine.offload import offload_of
from greenroom.errors import ConfigError, EngineError
from greenroom.experts import mailbox
from greenroom.experts.decode_steps import DecodeSteps
from greenroom.experts.mailbox import Mailboxes
from tests.engine.offloaded import offloaded, random_ids, saved_family
from tests.reference.families import make_model

pytest.importorskip("triton")

from greenroom.engine import hostless_steps
from greenroom.engine.step_runner import StepRunner
from tests.experts.test_decode_path import only
from tests.reference.interpreted import few_large_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS = {"qwen3_moe": (16, 4), "mixtral": (8, 2), "qwen2_moe": (12, 4)}
LANES = {"all on the CPU": 0, "half": 5, "all over PCIe": 10}
# The interpreter takes seconds a step: without a GPU each size meets one number of rows.
CASES = (
    [(size, rows) for size in ("none", "one", "top_k", "all") for rows in (1, 3)]
    if DEVICE == "cuda"
    else [("none", 1), ("one", 3), ("top_k", 3), ("all", 1)]
)


@pytest.fixture(autouse=True)
def quick_interpreter(monkeypatch):
    few_large_tiles(monkeypatch)


@pytest.fixture(scope="module", params=EXPERTS)
def family(request) -> Iterator[tuple[str, PreTrainedModel, Path]]:
    """Its name, the stock model on the device, and the folder that it was saved to."""
    with saved_family(request.param) as (stock, folder):
        yield request.param, stock.to(DEVICE), folder


@pytest.fixture(scope="module")
def mixtral() -> Iterator[tuple[PreTrainedModel, Path]]:
    with saved_family("mixtral") as (stock, folder):
        yield stock.to(DEVICE), folder


class Pair:
    """A runner over an offloaded model, and stock beside it that is given the same tokens."""

    def __init__(self, stock: PreTrainedModel, model: PreTrainedModel, runner: StepRunner) -> None:
        self.stock, self.model, self.runner = stock, model, runner
        self.seen = torch.zeros(runner.rows, 0, dtype=torch.long, device=DEVICE)

    @torch.no_grad()
    def check(self, logits: torch.Tensor) -> None:
        """Against stock, and against the offloaded model run layer by layer."""
        for other in (self.stock, self.model):
            expected = other(self.seen).logits[:, -1]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

    def prefill(self, length: int, seed: int = 0) -> None:
        self.seen = random_ids(self.runner.rows, length, seed).to(DEVICE)
        self.check(self.runner.prefill(self.seen))

    def step(self, ids: torch.Tensor | None = None) -> None:
        """Feeds ``ids``, or lets the runner take the likeliest tokens."""
        fed = ids.to(DEVICE) if ids is not None else self.stock(self.seen).logits[:, -1:].argmax(-1)
        self.seen = torch.cat([self.seen, fed], 1)
        self.check(self.runner.step(None if ids is None else fed).clone())


@pytest.mark.parametrize(("size", "rows"), CASES)
def test_logits_equal_stock_step_by_step(family, size, rows):
    name, stock, folder = family
    experts, top_k = EXPERTS[name]
    slots = {"none": 0, "one": 1, "top_k": top_k, "all": experts}[size]
    with offloaded(folder, cache_expert_num=slots, device=DEVICE) as model:
        runner = StepRunner(model, rows, 16)
        pair = Pair(stock, model, runner)
        pair.prefill(5)
        for lane, tenths in LANES.items():
            runner.steps.split = only(tenths, experts)
            before = offload_of(model).manager.counters.total()
            pair.step(random_ids(rows, 1, seed=tenths) if lane == "half" else None)
            runner.flush()
            offload_of(model).manager.check_invariants()
            counted = offload_of(model).manager.counters.total()
            assert (counted.misses == before.misses) == (size == "all")
            assert counted.hits + counted.misses > before.hits + before.misses
            if size == "all" and DEVICE == "cpu":
                break  # nothing is absent, so the split decides nothing
        runner.close()


def test_rows_of_padding_are_routed_nowhere(mixtral):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=2, device=DEVICE) as model:
        runner = StepRunner(model, 3, 16)
        pair = Pair(stock, model, runner)
        pair.prefill(4)
        for _ in range(2):
            pair.step()
            ids = runner.steps.path.record.device.ids
            assert ids.shape[1] == 4
            assert (ids[:, 3] == -1).all()
            assert (ids[:, :3] >= 0).all()
        runner.close()


def test_other_sequences_follow_in_the_same_cache(mixtral):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=2, device=DEVICE) as model:
        runner = StepRunner(model, 1, 12)
        pair = Pair(stock, model, runner)
        pair.prefill(9)
        steps = runner.steps
        pair.step()
        for length in (3, 10):
            pair.prefill(length, seed=length)
            pair.step()
        assert runner.steps is steps, "nothing was made anew"
        pair.step()
        with pytest.raises(ConfigError, match="KV cache of 12 tokens is full"):
            runner.step()
        runner.close()


def test_the_last_step_counts_once_flushed(mixtral):
    _, folder = mixtral
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner = StepRunner(model, 1, 16)
        runner.prefill(random_ids(1, 3).to(DEVICE))
        total = offload_of(model).manager.counters.total
        before = total().misses
        runner.step()
        assert total().misses == before
        for _ in range(2):
            runner.flush()
            assert total().misses == before + 2 * 2  # layers, experts a token
        runner.close()


# --- what goes wrong


def check_model_is_usable(stock: PreTrainedModel, model: PreTrainedModel) -> None:
    """Layer by layer, and through another runner."""
    other = StepRunner(model, 1, 16)
    pair = Pair(stock, model, other)
    pair.prefill(4, seed=9)
    pair.step()
    other.close()
    offload_of(model).manager.check_invariants()


def test_a_step_that_nobody_answers_is_given_up(mixtral, monkeypatch):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner = StepRunner(model, 3, 16, watchdog_s=0.3)
        prompts = random_ids(3, 4).to(DEVICE)
        runner.prefill(prompts)
        runner.steps.split = only(0, 8)
        runner.step()
        with monkeypatch.context() as patch:
            patch.setattr(Mailboxes, "arm", lambda self: None)
            with pytest.raises(EngineError, match=r"^decode step \d+: layer 0 has not been answered within 0.3 s$"):
                runner.step()
        assert not runner.usable
        for call in (runner.step, runner.prepare, lambda: runner.prefill(prompts)):
            with pytest.raises(EngineError, match=r"given up: decode step \d+: layer 0 has not been answered"):
                call()
        check_model_is_usable(stock, model)
        runner.close()
        runner.close()
        check_model_is_usable(stock, model)


def test_a_step_whose_cpu_job_does_not_end_is_given_up(mixtral, monkeypatch, caplog):
    stock, folder = mixtral
    monkeypatch.setattr(mailbox, "LATE_JOB_S", 0.05)
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        engine = offload_of(model).engine
        runner = StepRunner(model, 3, 16, watchdog_s=1)
        runner.prefill(random_ids(3, 4).to(DEVICE))
        runner.steps.split = only(0, 8)
        runner.step()
        boxes = runner.steps.path.mailboxes
        engine.throttle(1e12)  # for as long as this holds
        try:
            with pytest.raises(EngineError, match=r"^decode step \d+: layer 0 has not been answered within 1 s$"):
                runner.step()
            assert boxes.pending() == 0, "its job is not under way"
            with pytest.raises(EngineError, match=r"given up: decode step \d+: layer 0 has not been answered"):
                runner.step()
            runner.close()
            assert "job of layer 0 was given up and has not ended" in caplog.text
        finally:
            engine.throttle(1)
        check_model_is_usable(stock, model)
    assert boxes.abandon(0)
    assert engine._mailboxes == []


@pytest.mark.parametrize("layer", [0, 1])
def test_a_failing_cpu_job_reaches_the_caller(mixtral, layer):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner = StepRunner(model, 1, 16)
        pair = Pair(stock, model, runner)
        pair.prefill(4)
        runner.steps.split = only(0, 8)
        pair.step()
        addresses = runner.steps.path.mailboxes._addresses[layer]
        kept = addresses.copy()
        addresses[:] = 0
        with pytest.raises(EngineError, match=rf"^decode step \d+, layer {layer}: expert \d+ was chosen but has no"):
            runner.step()
        addresses[:] = kept
        assert runner.usable
        with pytest.raises(EngineError, match="no sequences to continue; call prefill first"):
            runner.step()
        pair.check(model(pair.seen).logits[:, -1])
        pair.prefill(3)
        pair.step()
        runner.close()


class Broken(Exception):
    pass


def test_an_error_while_work_is_enqueued(mixtral, monkeypatch):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=2, device=DEVICE) as model:
        runner = StepRunner(model, 1, 16)
        runner.prefill(random_ids(1, 4).to(DEVICE))

        def broken(self):
            raise Broken

        with monkeypatch.context() as patch:
            patch.setattr(DecodeSteps, "enqueued", broken)
            with pytest.raises(Broken):
                runner.step()
        with pytest.raises(EngineError, match="given up: Broken"):
            runner.step()
        check_model_is_usable(stock, model)
        runner.close()


def test_a_runner_that_cannot_be_prepared(mixtral, monkeypatch):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=2, device=DEVICE) as model:
        runner = StepRunner(model, 1, 16)

        def broken(*args):
            raise Broken("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(hostless_steps, "DecodePath", broken)
            with pytest.raises(Broken):
                runner.prefill(random_ids(1, 4).to(DEVICE))
        with pytest.raises(EngineError, match="could not be prepared: no memory"):
            runner.step()
        check_model_is_usable(stock, model)


def test_a_step_within_another_is_refused_and_harms_none(mixtral):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=2, device=DEVICE) as model:
        runner = StepRunner(model, 1, 16)
        pair = Pair(stock, model, runner)
        pair.prefill(4)
        with offload_of(model).manager.step(), pytest.raises(RuntimeError, match="a step is running already"):
            runner.step()
        pair.step()
        runner.close()


def test_used_out_of_turn(mixtral):
    _, folder = mixtral
    with offloaded(folder, cache_expert_num=2, device=DEVICE) as model:
        runner = StepRunner(model, 2, 16)
        for call in (runner.step, runner.prepare):
            with pytest.raises(EngineError, match="call prefill first"):
                call()
        with pytest.raises(EngineError, match="call prefill first"):
            _ = runner.steps
        for rows, length in ((1, 4), (3, 4), (2, 16), (2, 0)):
            with pytest.raises(ConfigError, match=r"takes \[2, < 16\] prompt tokens, not"):
                runner.prefill(random_ids(rows, length).to(DEVICE))
        runner.prefill(random_ids(2, 15).to(DEVICE), prepare=False)
        assert not runner.prepared
        runner.step()
        assert runner.prepared
        for _ in range(2):
            runner.close()
        runner.flush()
        for call in (runner.step, runner.prepare, lambda: runner.prefill(random_ids(2, 4).to(DEVICE))):
            with pytest.raises(EngineError, match="the runner is closed"):
                call()


@pytest.mark.parametrize("rows", [0, 33])
def test_batches_that_are_too_large(mixtral, rows):
    _, folder = mixtral
    with (
        offloaded(folder, device=DEVICE) as model,
        pytest.raises(ConfigError, match=f"1 to 32 sequences, not {rows}"),
    ):
        StepRunner(model, rows, 16)


def test_a_cache_that_is_not_plain_is_refused_at_once():
    with (
        saved_family("gpt_oss") as (_, folder),
        offloaded(folder, device=DEVICE) as model,
        pytest.raises(ConfigError, match=r"plain K/V cache, and GptOssForCausalLM has .*Sliding"),
    ):
        StepRunner(model, 1, 16)


def test_only_offloaded_models():
    with pytest.raises(ConfigError, match="was not loaded by greenroom"):
        StepRunner(make_model("mixtral"), 1, 16)


# --- graphs


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("tenths", LANES.values(), ids=LANES)
@pytest.mark.parametrize("slots", [0, 1, 4, 100])
@torch.no_grad()
def test_a_replay_equals_the_same_step_run_eagerly(family, slots, tenths, rows):
    """Bit for bit: the same tokens, cache contents and split."""
    name, _, folder = family
    experts, _ = EXPERTS[name]
    with offloaded(folder, cache_expert_num=min(slots, experts), update_expert_num=0, device=DEVICE) as model:
        runner = StepRunner(model, rows, 64)
        for length in (40, 5):  # free slots fill behind the first prompt, and nothing is replaced later
            runner.prefill(random_ids(rows, length).to(DEVICE))
        runner.steps.split = only(tenths, experts)
        for _ in range(3):
            runner.step()
        graph = runner._graph
        assert graph is not None
        cached = [tensor for layer in runner._fixed().layers for tensor in (layer.keys, layer.values)]
        for _ in range(4):
            slot_of = offload_of(model).manager.cache.slot_of.copy()
            length = runner._length
            start, start_ids = [tensor.clone() for tensor in cached], runner._ids.clone()
            replayed = runner.step().clone()
            end, end_ids = [tensor.clone() for tensor in cached], runner._ids.clone()
            for tensor, before in zip(cached, start, strict=True):
                tensor.copy_(before)
            runner._ids.copy_(start_ids)
            runner._set_length(length)
            runner._graph = None
            eager = runner.step().clone()
            runner._graph = graph
            assert (offload_of(model).manager.cache.slot_of == slot_of).all()
            assert torch.equal(replayed, eager)
            assert torch.equal(runner._ids, end_ids)
            for tensor, after in zip(cached, end, strict=True):
                assert torch.equal(tensor, after)
        runner.close()
