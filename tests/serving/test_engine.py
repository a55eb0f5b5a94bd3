"""ServingEngine: requests, constraints and knobs, over a runner that computes hashes."""

import threading

import pytest
import torch

from greenroom.errors import ConfigError
from greenroom.serving.engine import ModelFacts, ServingEngine
from greenroom.serving.requests import Failed, Finished, FinishReason, SamplingParams
from tests.reference.slow_runner import SlowRunner
from tests.reference.tokenizer import VOCAB
from tests.serving.drive import EOS, Allow, alone
from tests.serving.gated import TOKENIZER, WAIT_S, GatedRunner, ask, until


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
