"""A step that is started while the one before is under way: its logits are those of stock transformers, and whatever
goes wrong in either is said."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from greenroom.engine.offload import offload_of
from greenroom.errors import ConfigError, EngineError
from greenroom.experts.mailbox import Mailboxes
from tests.engine.offloaded import offloaded, random_ids, saved_family

pytest.importorskip("triton")

from greenroom.engine.step_runner import StepRunner
from tests.experts.test_decode_path import only
from tests.reference.interpreted import few_large_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def quick_interpreter(monkeypatch):
    few_large_tiles(monkeypatch)


@pytest.fixture(scope="module")
def mixtral() -> Iterator[tuple[PreTrainedModel, Path]]:
    with saved_family("mixtral") as (stock, folder):
        yield stock.to(DEVICE), folder


@torch.no_grad()
def check(stock: PreTrainedModel, seen: torch.Tensor, logits: list[torch.Tensor]) -> None:
    """``logits`` are of the last tokens of ``seen``, one each."""
    expected = stock(seen).logits[:, -len(logits) :]
    torch.testing.assert_close(torch.stack(logits, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slots", [0, 3, 8])
def test_logits_equal_stock(mixtral, slots):
    """Experts land and are admitted between steps of which the later one does not wait for the earlier."""
    stock, folder = mixtral
    length, count = 4, 12 if DEVICE == "cuda" else 6
    with offloaded(folder, cache_expert_num=slots, policy="lru", device=DEVICE) as model:
        runner, manager = StepRunner(model, 2, 40), offload_of(model).manager
        for seed, tenths in enumerate((0, 5, 10)):
            seen = random_ids(2, length + count, seed).to(DEVICE)
            runner.prefill(seen[:, :length])
            runner.steps.split = only(tenths, 8)
            before = manager.counters.total()
            found = []
            for token in range(length, length + count):
                # Kept before the next step is started, which overwrites them.
                found.append(runner.start(seen[:, token : token + 1]).clone())
                assert runner.steps.num_open == 1
            runner.flush()
            assert runner.steps.num_open == 0
            check(stock, seen, found)
            manager.check_invariants()
            total = manager.counters.total()
            used = total.hits + total.misses - before.hits - before.misses
            assert 2 * 2 * count <= used <= 2 * 4 * count, "layers, experts of two tokens"
        assert (manager.counters.total().landed > 0) == (slots == 3)
        runner.close()


def test_the_likeliest_tokens_feed_the_next_step(mixtral):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=2, device=DEVICE) as model:
        runner = StepRunner(model, 1, 16)
        seen = random_ids(1, 4).to(DEVICE)
        logits = runner.prefill(seen)
        found = []
        for _ in range(4):
            seen = torch.cat([seen, logits.argmax(-1, keepdim=True)], 1)
            logits = runner.start().clone()
            found.append(logits)
        runner.wait()
        check(stock, seen, found)
        runner.close()


def test_a_step_that_nobody_wants_is_not_counted(mixtral):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner, total = StepRunner(model, 1, 16), offload_of(model).manager.counters.total
        runner.prefill(random_ids(1, 3).to(DEVICE))
        before = total().misses
        for _ in range(2):
            runner.start()
        runner.discard()
        assert total().misses == before + 2 * 2, "layers, experts a token"
        with pytest.raises(EngineError, match="call prefill first"):
            runner.start()
        seen = random_ids(1, 5, seed=1).to(DEVICE)
        runner.prefill(seen[:, :4])
        check(stock, seen, [runner.step(seen[:, 4:])])
        runner.discard()
        assert runner.step() is not None, "nothing was under way"
        runner.close()


def test_the_cache_may_be_full_behind_a_step_under_way(mixtral):
    _, folder = mixtral
    with offloaded(folder, cache_expert_num=2, device=DEVICE) as model:
        runner = StepRunner(model, 1, 6)
        runner.prefill(random_ids(1, 4).to(DEVICE))
        for _ in range(2):
            runner.start()
        with pytest.raises(ConfigError, match="KV cache of 6 tokens is full"):
            runner.start()
        runner.wait()
        runner.close()


def test_a_runner_may_be_closed_with_a_step_under_way(mixtral):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=2, device=DEVICE) as model:
        runner = StepRunner(model, 1, 16)
        runner.prefill(random_ids(1, 4).to(DEVICE))
        runner.start()
        runner.close()
        seen = random_ids(1, 6).to(DEVICE)
        with torch.no_grad():
            torch.testing.assert_close(model(seen).logits, stock(seen).logits, rtol=1e-4, atol=1e-4)
        offload_of(model).manager.check_invariants()


# --- what goes wrong


def test_only_so_many_steps_are_under_way(mixtral):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=2, device=DEVICE) as model:
        runner = StepRunner(model, 1, 16)
        seen = random_ids(1, 6).to(DEVICE)
        runner.prefill(seen[:, :4])
        hostless = runner._hostless
        first = runner.start(seen[:, 4:5]).clone()
        hostless.start(runner._graph.replay if runner._graph else hostless.hostless(runner._forward), 1)
        with pytest.raises(RuntimeError, match=r"too many steps are open \(2\)"):
            hostless.start(lambda: None, 1)
        hostless.wait()
        check(stock, seen[:, :5], [first])
        runner.close()


@pytest.mark.parametrize("behind", ["wait", "start"])
def test_a_failing_cpu_job_reaches_the_caller(mixtral, behind):
    """Of whatever comes behind it: so nobody makes anything of its logits."""
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner = StepRunner(model, 1, 16)
        runner.prefill(random_ids(1, 4).to(DEVICE))
        runner.steps.split = only(0, 8)
        addresses = runner.steps.path.mailboxes._addresses[1]
        kept = addresses.copy()
        addresses[:] = 0
        runner.start()
        with pytest.raises(EngineError, match=r"^decode step \d+( or \d+)?, layer 1: expert \d+ was chosen but has no"):
            getattr(runner, behind)()
        addresses[:] = kept
        assert runner.usable
        assert runner.steps.num_open == 0
        with pytest.raises(EngineError, match="no sequences to continue; call prefill first"):
            runner.start()
        seen = random_ids(1, 5, seed=1).to(DEVICE)
        runner.prefill(seen[:, :4])
        runner.steps.split = only(0, 8)
        check(stock, seen, [runner.start(seen[:, 4:]).clone()])
        runner.wait()
        runner.close()


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU device waits for a step while it is enqueued")
def test_two_steps_that_nobody_answers_are_given_up(mixtral, monkeypatch):
    """The device waits for an answer in the first, and would again in the second."""
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner = StepRunner(model, 1, 16, watchdog_s=0.5)
        runner.prefill(random_ids(1, 4).to(DEVICE))
        runner.steps.split = only(0, 8)
        with monkeypatch.context() as patch:
            patch.setattr(Mailboxes, "arm", lambda self: None)
            runner.start()
            with pytest.raises(EngineError, match=r"^decode step \d+: layer 0 has not been answered within 0.5 s$"):
                runner.start()
        assert not runner.usable
        end = torch.cuda.Event()
        end.record()
        assert end.query(), "the device has been let go of"
        runner.close()
        seen = random_ids(1, 6).to(DEVICE)
        with torch.no_grad():
            torch.testing.assert_close(model(seen).logits, stock(seen).logits, rtol=1e-4, atol=1e-4)
