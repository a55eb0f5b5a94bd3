"""ServingEngine: how requests and the engine itself end, whatever is under way."""

import threading
import time

import pytest

from greenroom.errors import EngineError, QueueFullError
from greenroom.serving.requests import Finished, FinishReason, SamplingParams
from tests.reference.slow_runner import SlowOffload
from tests.reference.tokenizer import VOCAB
from tests.serving.drive import alone
from tests.serving.gated import WAIT_S, GatedRunner, ask, until


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
