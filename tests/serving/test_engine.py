"""ServingEngine: threads, ends and failures, over a runner that computes hashes."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from greenroom.errors import ConfigError, EngineError, QueueFullError
from greenroom.serving.engine import ModelFacts, ServingEngine
from greenroom.serving.requests import Failed, Finished, FinishReason, Piece, SamplingParams
from tests.reference.slow_runner import SlowOffload, SlowRunner
from tests.reference.tokenizer import VOCAB, make_tokenizer
from tests.serving.drive import EOS, Allow, Listener, alone

TOKENIZER = make_tokenizer()
WAIT_S = 30


class GatedRunner(SlowRunner):
    """Passes wait for a permission each while the gate is closed."""

    def __init__(self, **knobs) -> None:
        super().__init__(**knobs)
        self.open = threading.Event()
        self.open.set()
        self.permits = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)

    def run(self, chunks, meanwhile=None, behind=None):
        self.entered.release()
        while not self.open.is_set() and not self.permits.acquire(timeout=0.01):
            pass
        return super().run(chunks, meanwhile, behind)


class Client(Listener):
    """A listener that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()
        self.began = threading.Event()
        self.errors: list[BaseException] = []

    def __call__(self, event) -> None:
        try:
            super().__call__(event)
        except BaseException as error:
            self.errors.append(error)
            raise
        self.began.set()
        if not isinstance(event, Piece):
            self.ended.set()

    def result(self) -> Finished | Failed:
        assert self.ended.wait(WAIT_S), "the request never ended"
        assert not self.errors
        return self.last


@pytest.fixture
def opened():
    engines = []

    def open_(runner=None, context_length=200, **knobs) -> ServingEngine:
        runner = runner or GatedRunner(num_blocks=64, block_size=4, max_sequences=4, max_tokens=32, vocabulary=VOCAB)
        facts = ModelFacts(VOCAB, context_length, frozenset({EOS}), torch.device("cpu"))
        engine = ServingEngine(facts, TOKENIZER, runner, **knobs)
        engine.runner = runner
        engines.append(engine)
        return engine

    yield open_
    for engine in engines:
        engine.runner.open.set()
        engine.close()
        assert not engine._thread.is_alive()
        assert engine.runner.closed


def ask(engine, prompt=(50, 51), constraint=None, client=None, **knobs) -> tuple[Client, object]:
    client = client or Client()
    knobs = {"temperature": 0, "max_tokens": 10} | knobs
    return client, engine.submit(prompt, SamplingParams(**knobs), client, constraint)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


class TestRequests:
    def test_tokens_text_and_counts(self, opened) -> None:
        client, handle = ask(opened(), [50, 51], ignore_eos=True)
        last = client.result()
        expected = alone([50, 51], SamplingParams(temperature=0, ignore_eos=True), 0, 10, VOCAB)
        assert client.tokens == expected
        assert client.text == TOKENIZER.decode(expected, skip_special_tokens=True)
        assert last == Finished(FinishReason.LENGTH, 2, 10, 0)
        assert handle.request_id == 0

    def test_many_threads(self, opened) -> None:
        engine, clients = opened(max_waiting=100), {}

        def work(first) -> None:
            for prompt in range(first, first + 8):
                params = {"temperature": 1.0, "seed": prompt}
                clients[prompt] = ask(engine, [50, prompt], **params)[0]

        threads = [threading.Thread(target=work, args=(60 + 10 * index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for prompt, client in clients.items():
            client.result()
            assert client.tokens == alone([50, prompt], SamplingParams(temperature=1.0), prompt, 10, VOCAB)
        until(lambda: engine.stats().running == 0)
        stats = engine.stats()
        assert stats.kv_blocks_used == 0
        assert stats.prompt_tokens == 64
        assert stats.completion_tokens == sum(len(client.tokens) for client in clients.values())

    def test_without_a_seed_outputs_differ(self, opened) -> None:
        engine = opened(max_waiting=100)
        clients = [ask(engine, temperature=1.0, ignore_eos=True)[0] for _ in range(5)]
        for client in clients:
            client.result()
        assert len({tuple(client.tokens) for client in clients}) == 5

    def test_max_tokens_none_fills_the_context(self, opened) -> None:
        client, _ = ask(opened(context_length=30), max_tokens=None, ignore_eos=True)
        assert client.result() == Finished(FinishReason.LENGTH, 2, 28, 0)

    def test_the_context_is_what_the_blocks_hold(self, opened) -> None:
        engine = opened(GatedRunner(num_blocks=5, block_size=4, vocabulary=VOCAB))
        assert engine.context_length == 20
        client, _ = ask(engine, max_tokens=None, ignore_eos=True)
        assert client.result() == Finished(FinishReason.LENGTH, 2, 18, 0)
        with pytest.raises(ConfigError, match="20"):
            ask(engine, [50] * 15, max_tokens=6)

    def test_a_prompt_that_was_there(self, opened) -> None:
        engine = opened()
        first, _ = ask(engine, [50] * 9)
        first.result()
        second, _ = ask(engine, [50] * 9)
        assert second.result().cached_tokens == 8
        third, _ = ask(engine, [50] * 8)  # the last token is computed again
        assert third.result().cached_tokens == 7
        assert second.tokens == first.tokens
        assert engine.stats().cached_tokens == 15

    @pytest.mark.parametrize("count", [0, 3])
    def test_logprobs(self, opened, count) -> None:
        client, _ = ask(opened(), logprobs=count)
        client.result()
        assert [logprob.token_id for logprob in client.logprobs] == client.tokens
        for logprob in client.logprobs:
            assert len(logprob.top) == count
            if count:
                assert logprob.top[0] == (logprob.token_id, logprob.logprob)  # greedy

    def test_stop_text_is_no_part_of_the_output(self, opened) -> None:
        engine = opened()
        whole, _ = ask(engine, logit_bias={4 + 65: 100.0, 4 + 66: 99.0}, frequency_penalty=1.0)
        whole.result()
        stop = whole.text[3:5]
        assert len(stop) == 2
        client, _ = ask(engine, logit_bias={4 + 65: 100.0, 4 + 66: 99.0}, frequency_penalty=1.0, stop=(stop,))
        assert client.result().reason == FinishReason.STOP
        assert client.text == whole.text[: whole.text.index(stop)]
        assert client.tokens == whole.tokens[: whole.text.index(stop) + 2]

    def test_stop_tokens_and_end_tokens(self, opened) -> None:
        engine = opened()
        free, _ = ask(engine, ignore_eos=True)
        free.result()
        stopped, _ = ask(engine, ignore_eos=True, stop_token_ids=(free.tokens[3],))
        assert stopped.result().reason == FinishReason.STOP
        assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[3]) + 1]
        assert stopped.text == TOKENIZER.decode(stopped.tokens[:-1], skip_special_tokens=True)
        ended, _ = ask(engine, logit_bias={EOS: 100.0})
        assert (ended.result().reason, ended.tokens, ended.text) == (FinishReason.STOP, [EOS], "")


class TestConstraints:
    def test_only_what_is_allowed(self, opened) -> None:
        constraint = Allow([70, 80], VOCAB)
        client, _ = ask(opened(), constraint=constraint)
        client.result()
        assert set(client.tokens) <= {70, 80}
        assert constraint.accepted == client.tokens

    def test_a_finished_constraint_ends_the_output(self, opened) -> None:
        constraint = Allow([70, 80], VOCAB)
        constraint.finish_after = 3
        client, _ = ask(opened(), constraint=constraint)
        assert client.result() == Finished(FinishReason.STOP, 2, 3, 0)

    @pytest.mark.parametrize("broken", ["allowed", "accept", "finished"])
    def test_a_broken_one_fails_alone(self, opened, broken) -> None:
        engine = opened()
        engine.runner.open.clear()
        bad, _ = ask(engine, constraint=Allow([70], VOCAB, broken))
        good, _ = ask(engine)
        engine.runner.open.set()
        assert isinstance(bad.result(), Failed)
        assert "the constraint failed" in str(bad.last.error)
        assert isinstance(good.result(), Finished)
        assert engine.stats().finished.get("failed") == 1 or engine.drain(WAIT_S)

    def test_nothing_allowed(self, opened) -> None:
        client, _ = ask(opened(), constraint=Allow([], VOCAB))
        assert "the constraint allows no token" in str(client.result().error)

    def test_bits_of_another_vocabulary(self, opened) -> None:
        client, _ = ask(opened(), constraint=Allow([1], 31))
        assert "take uint32 [9]" in str(client.result().error)


class TestEnds:
    def test_cancel_while_running(self, opened) -> None:
        engine = opened()
        engine.runner.open.clear()
        client, handle = ask(engine, max_tokens=150, ignore_eos=True)
        engine.runner.permits.release(2)
        assert client.began.wait(WAIT_S)
        handle.cancel()
        handle.cancel()
        engine.runner.open.set()
        assert client.result().reason == FinishReason.CANCELLED
        handle.cancel()
        assert len(client.tokens) < 10
        assert engine.drain(WAIT_S)
        assert engine.stats().kv_blocks_used == 0

    def test_cancel_while_waiting(self, opened) -> None:
        engine = opened(GatedRunner(max_sequences=1, num_blocks=40, vocabulary=VOCAB))
        engine.runner.open.clear()
        first, _ = ask(engine)
        second, handle = ask(engine)
        until(lambda: engine.stats().waiting >= 1)
        handle.cancel()
        engine.runner.open.set()
        assert second.result() == Finished(FinishReason.CANCELLED, 2, 0, 0)
        assert first.result().reason != FinishReason.CANCELLED

    def test_a_full_queue(self, opened) -> None:
        engine = opened(GatedRunner(max_sequences=2, num_blocks=40, vocabulary=VOCAB), max_waiting=1)
        engine.runner.open.clear()
        clients = [ask(engine)[0] for _ in range(3)]
        with pytest.raises(QueueFullError, match="3 requests"):
            ask(engine)
        engine.runner.open.set()
        for client in clients:
            client.result()
        until(lambda: not engine._unfinished)
        ask(engine)[0].result()

    def test_drain(self, opened) -> None:
        engine = opened()
        engine.runner.open.clear()
        client, _ = ask(engine)
        assert not engine.drain(0.01)
        with pytest.raises(EngineError, match="drains"):
            ask(engine)
        engine.runner.open.set()
        assert engine.drain(WAIT_S)
        assert isinstance(client.last, Finished)

    def test_close_cancels(self, opened) -> None:
        engine = opened()
        engine.runner.open.clear()
        clients = [ask(engine, max_tokens=100, ignore_eos=True)[0] for _ in range(6)]
        assert engine.runner.entered.acquire(timeout=WAIT_S)
        closing = threading.Thread(target=engine.close)
        closing.start()
        until(lambda: engine._closing)
        engine.runner.open.set()
        closing.join(WAIT_S)
        assert [client.result().reason for client in clients] == [FinishReason.CANCELLED] * 6
        with pytest.raises(EngineError, match="closed"):
            ask(engine)
        assert engine.runner.closed == 1
        assert engine.drain(0)

    def test_close_from_an_event(self, opened) -> None:
        engine = opened()
        seen = []

        def on_event(event) -> None:
            seen.append(event)
            engine.close()

        engine.submit([50], SamplingParams(), on_event)
        engine._thread.join(WAIT_S)
        assert not engine._thread.is_alive()
        assert isinstance(seen[-1], Finished)

    def test_an_idle_engine_sleeps(self, opened) -> None:
        engine = opened()
        ask(engine)[0].result()
        assert engine.drain(WAIT_S)
        steps, plans = engine.stats().steps, []
        engine._loop.scheduler.plan = lambda: plans.append(1) or []
        time.sleep(0.1)
        assert len(plans) <= 1
        assert engine.stats().steps == steps

    def test_host_memory_is_closed(self, opened) -> None:
        runner = GatedRunner(num_blocks=20, vocabulary=VOCAB)
        offload = SlowOffload(runner, 50)
        engine = opened(runner, offload=offload)
        for first in (50, 60, 70, 50):
            client, _ = ask(engine, [first] * 12, max_tokens=30, ignore_eos=True)
            client.result()
        assert client.tokens == alone([50] * 12, SamplingParams(temperature=0, ignore_eos=True), 0, 30, VOCAB)
        assert client.last.cached_tokens == 11
        assert engine.stats().loaded_tokens > 0
        engine.close()
        assert offload.closed == 1


class TestFailures:
    def test_a_pass_takes_those_in_it_alone(self, opened) -> None:
        engine = opened(GatedRunner(max_sequences=1, num_blocks=40, vocabulary=VOCAB))
        engine.runner.open.clear()
        first, _ = ask(engine)
        second, _ = ask(engine)
        engine.runner.fail_next = EngineError("layer 3 did not answer")
        engine.runner.open.set()
        assert str(first.result().error) == "layer 3 did not answer"
        assert isinstance(second.result(), Finished)

    def test_any_exception_of_a_pass(self, opened) -> None:
        engine = opened()
        engine.runner.fail_next = torch.OutOfMemoryError("no memory")
        first, _ = ask(engine)
        assert "a forward pass failed: OutOfMemoryError('no memory')" in str(first.result().error)
        assert isinstance(ask(engine)[0].result(), Finished)

    def test_a_runner_of_no_use_ends_the_engine(self, opened) -> None:
        class Broken(GatedRunner):
            def run(self, chunks, meanwhile=None, behind=None):
                assert self.open.wait(WAIT_S)
                raise EngineError("given up")

        runner = Broken(max_sequences=1, num_blocks=40, vocabulary=VOCAB)
        runner.open.clear()
        engine = opened(runner)
        clients = [ask(engine)[0] for _ in range(5)]
        runner.open.set()
        errors = [str(client.result().error) for client in clients]
        assert errors[0] == "given up"
        assert "3 forward passes in a row failed" in errors[-1]
        engine._thread.join(WAIT_S)
        with pytest.raises(EngineError, match="the engine has failed: 3 forward passes"):
            ask(engine)
        assert engine.drain(0)
        assert runner.closed == 1

    def test_good_passes_between_bad_ones(self, opened) -> None:
        engine = opened()
        for _ in range(5):
            engine.runner.fail_next = EngineError("once")
            assert isinstance(ask(engine)[0].result(), Failed)
            assert isinstance(ask(engine)[0].result(), Finished)

    def test_logits_that_are_not_finite(self, opened) -> None:
        class Nan(GatedRunner):
            def compute(self, chunks):
                logits = super().compute(chunks)
                logits[np.array([chunk.token_ids[0] == 99 for chunk in chunks])] = np.nan
                return logits

        engine = opened(Nan(num_blocks=40, vocabulary=VOCAB))
        engine.runner.open.clear()
        bad, _ = ask(engine, [99, 50])
        good, _ = ask(engine, [98, 50])
        engine.runner.open.set()
        assert "not finite" in str(bad.result().error)
        assert isinstance(good.result(), Finished)

    def test_a_listener_that_raises_ends_its_request_alone(self, opened, caplog) -> None:
        engine = opened()

        def on_event(event) -> None:
            raise KeyError("no client")

        engine.submit([50], SamplingParams(), on_event)
        assert isinstance(ask(engine)[0].result(), Finished)
        assert engine.drain(WAIT_S)
        assert engine.stats().finished["failed"] == 1
        assert "no client" in caplog.text

    def test_a_runner_that_cannot_be_closed(self, opened, caplog) -> None:
        class Stuck(GatedRunner):
            def close(self) -> None:
                super().close()
                raise RuntimeError("device lost")

        runner = Stuck(num_blocks=40, vocabulary=VOCAB)
        offload = SlowOffload(runner, 5)
        engine = opened(runner, offload=offload)
        ask(engine)[0].result()
        engine.close()
        assert "device lost" in caplog.text
        assert offload.closed == 1
        assert engine.drain(0)

    def test_a_defect_of_the_engine_itself(self, opened) -> None:
        engine = opened()
        engine.runner.open.clear()
        client, _ = ask(engine)
        assert engine.runner.entered.acquire(timeout=WAIT_S)
        engine._loop.scheduler.passed = None
        engine.runner.open.set()
        assert "the engine failed: TypeError" in str(client.result().error)
        engine._thread.join(WAIT_S)
        assert engine.runner.closed == 1


class TestKnobs:
    def test_out_of_range(self, opened) -> None:
        runner = SlowRunner(max_sequences=4)
        facts = ModelFacts(VOCAB, 100, frozenset(), torch.device("cpu"))
        with pytest.raises(ConfigError, match="max_waiting"):
            ServingEngine(facts, TOKENIZER, runner, max_waiting=-1)
        with pytest.raises(ConfigError, match="at least 4"):
            ServingEngine(facts, TOKENIZER, runner, max_step_tokens=3)
        with pytest.raises(ConfigError, match="not 3"):
            ServingEngine(facts, TOKENIZER, SlowRunner(max_sequences=4, max_tokens=3))

    def test_a_long_prompt_comes_in_chunks_and_the_others_go_on(self, opened) -> None:
        runner = GatedRunner(num_blocks=100, block_size=4, max_sequences=4, max_tokens=64, vocabulary=VOCAB)
        engine = opened(runner, context_length=400, max_step_tokens=16)
        runner.open.clear()
        short, _ = ask(engine, [50], max_tokens=40, ignore_eos=True)
        runner.permits.release(5)
        assert short.began.wait(WAIT_S)
        long, _ = ask(engine, [51] * 200, max_tokens=2, ignore_eos=True)
        runner.open.set()
        long.result()
        short.result()
        mixed = [chunks for chunks in runner.passes if max(chunks) > 1]
        assert all(sum(chunks) <= 16 for chunks in mixed)
        assert [chunks for chunks in mixed if len(chunks) == 2] == [[1, 15]] * 13 + [[1, 5]]
