"""ServingEngine: what a failure takes with it, and what goes on."""

import numpy as np
import pytest
import torch

from greenroom.errors import EngineError
from greenroom.serving.requests import Failed, Finished, SamplingParams
from tests.reference.slow_runner import SlowOffload
from tests.reference.tokenizer import VOCAB
from tests.serving.gated import WAIT_S, GatedRunner, ask


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
