"""Passes of few tokens through the path without the host: graphs on a GPU, else Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from greenroom.engine.batch import SequenceChunk
from greenroom.engine.offload import offload_of
from greenroom.engine.paged.packing import Limits
from greenroom.engine.paged.probe import PagedModel, probe
from greenroom.engine.paged.runner import PagedRunner
from greenroom.errors import ConfigError, EngineError
from greenroom.experts.mailbox import Mailboxes
from tests.engine.offloaded import offloaded, saved_family
from tests.engine.paged.driver import Growing, Traffic
from tests.reference.families import FAMILIES

pytest.importorskip("triton")

from greenroom.engine.paged import decode
from tests.experts.test_decode_path import only
from tests.reference.interpreted import few_large_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = Limits(block_size=4, num_blocks=160, max_sequences=32, max_tokens=256, max_context=40, vocabulary=128)


@pytest.fixture(autouse=True)
def quick_interpreter(monkeypatch):
    few_large_tiles(monkeypatch)


@pytest.fixture(scope="module", params=["mixtral", "gpt_oss", "granitemoe", "deepseek_v2", "deepseek_v3"])
def family(request) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    with saved_family(request.param) as (stock, folder), offloaded(folder, cache_expert_num=3, device=DEVICE) as model:
        yield stock.to(DEVICE), model


@pytest.fixture(scope="module", params=[name for name in FAMILIES if name not in ("qwen3_next", "nemotron_h")])
def every_family(request) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    with saved_family(request.param) as (stock, folder), offloaded(folder, cache_expert_num=3, device=DEVICE) as model:
        yield stock.to(DEVICE), model


@pytest.fixture(scope="module")
def mixtral() -> Iterator[tuple[PreTrainedModel, Path]]:
    with saved_family("mixtral") as (stock, folder):
        yield stock.to(DEVICE), folder


def make(model: PreTrainedModel, limits: Limits = LIMITS, **options) -> PagedRunner:
    kept = probe(model)
    assert isinstance(kept, PagedModel)
    return PagedRunner(model, kept, limits, decode_path=True, **options)


def never_layer_by_layer(runner: PagedRunner) -> None:
    def refused(*_args):
        raise AssertionError("a pass went layer by layer")

    runner._run_layer_by_layer = refused


@contextmanager
def layer_by_layer(runner: PagedRunner) -> Iterator[None]:
    """Inside, no pass is short enough for rows."""
    rows, runner._decode.max_rows = runner._decode.max_rows, 0
    yield
    runner._decode.max_rows = rows


def begin(traffic: Traffic, rows: int, prompt: int = 9) -> list[Growing]:
    """``rows`` sequences of different lengths whose prompts have been run, layer by layer."""
    sequences = [traffic.begin(prompt + row % 5 + 14) for row in range(rows)]
    with layer_by_layer(traffic.runner):
        for first in range(0, rows, 8):
            traffic.run([(sequences[row], prompt + row % 5) for row in range(first, min(first + 8, rows))])
    return sequences


def test_rows_come_and_go_between_steps(family):
    stock, model = family
    runner = make(model)
    traffic = Traffic(runner, stock, seed=1)
    first, second, third = begin(traffic, 3)
    traffic.run([(first, 1), (second, 1), (third, 1)])
    traffic.run([(third, 1), (first, 1)])  # another bucket, another order
    traffic.run([(second, 4), (first, 1), (third, 1)])  # several rows of one sequence
    with layer_by_layer(runner):
        traffic.run([(second, 1), (first, 1), (third, 2)])
    traffic.end(first)
    traffic.run([(second, 1), (third, 1)])
    runner.flush()
    offload_of(model).manager.check_invariants()
    runner.close()


def test_a_first_token_may_be_decoded(mixtral):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=3, device=DEVICE) as model:
        traffic = Traffic(make(model), stock, seed=2)
        traffic.run([(traffic.begin(5), 1)])
        traffic.runner.close()


def test_short_chunks_are_rows_of_a_pass(every_family):
    stock, model = every_family
    runner = make(model)
    traffic = Traffic(runner, stock, seed=11)
    first, second, third = traffic.begin(22), traffic.begin(40), traffic.begin(9)
    with layer_by_layer(runner):
        traffic.run([(first, 11)])
    never_layer_by_layer(runner)
    traffic.run([(second, 3), (first, 3), (third, 1)])  # from position 0; from within a block, over its end
    traffic.run([(third, 1), (second, 2), (first, 2)])
    runner.flush()
    offload_of(model).manager.check_invariants()
    runner.close()


def test_a_pass_of_as_many_rows_as_there_are(mixtral):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=3, device=DEVICE) as model:
        runner = make(model)
        traffic = Traffic(runner, stock, seed=12)
        sequence, ran = traffic.begin(40), runner._run_layer_by_layer
        never_layer_by_layer(runner)
        traffic.run([(sequence, 32)])
        eager = []
        runner._run_layer_by_layer = lambda *args: (eager.append(1), ran(*args))[1]
        traffic.run([(traffic.begin(33), 33)])
        assert eager == [1]
        runner.close()


@pytest.mark.parametrize(("max_sequences", "max_tokens", "rows"), [(4, 256, 32), (1, 20, 20), (1, 1, 1)])
def test_rows_are_there_for_more_tokens_than_sequences(mixtral, max_sequences, max_tokens, rows):
    _, folder = mixtral
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner = make(model, limits=replace(LIMITS, max_sequences=max_sequences, max_tokens=max_tokens))
        never_layer_by_layer(runner)
        assert runner._decode.max_rows == rows
        runner.run([SequenceChunk([5] * rows, 0, range(8))])
        runner.close()


def test_what_is_done_meanwhile(mixtral):
    _, folder = mixtral
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner, done = make(model), []
        hostless, eager = runner._decode.hostless, runner._run_layer_by_layer
        enqueued, wait = hostless.steps.enqueued, hostless._wait_for
        hostless.steps.enqueued = lambda: (enqueued(), done.append("enqueued"))
        hostless._wait_for = lambda started: (done.append("wait"), wait(started))
        runner._run_layer_by_layer = lambda *args: (done.append("eager"), eager(*args))[1]
        runner.run([SequenceChunk([5, 6], 0, [0])])  # on a GPU with passes before it that warm up
        done.clear()
        shapes = []
        hooks = (lambda: done.append("meanwhile")), lambda logits: (done.append("behind"), shapes.append(logits.shape))
        runner.run([SequenceChunk([5, 6], 0, [0])], *hooks)
        assert done == ["enqueued", "meanwhile", "behind", "wait"]
        done.clear()
        runner.run([SequenceChunk([5] * 33, 0, range(9))], *hooks)
        assert done == ["meanwhile", "eager", "behind"]
        assert shapes == [(1, LIMITS.vocabulary)] * 2
        runner.close()


def test_passes_that_were_expected(family):
    stock, model = family
    runner = make(model)
    traffic = Traffic(runner, stock, seed=13)
    first, second, third = begin(traffic, 3)
    packed = []
    own = runner._decode.ready
    runner._decode.ready = lambda packing: (packed.append(packing), own(packing))[1]
    traffic.run([(first, 1), (second, 1), (third, 1)], then=[third, first])
    traffic.run([(third, 1), (first, 1)], then=[third, first, second])  # as announced: another bucket, another order
    traffic.run([(third, 1), (first, 1), (second, 1)], then=[first])
    assert len(packed) == 4, "what was expected is not packed again"
    traffic.run([(second, 1), (third, 1)], then=[first, second])  # something else
    with layer_by_layer(runner):
        traffic.run([(first, 2)])
    traffic.run([(first, 1), (second, 1)])
    runner.flush()
    offload_of(model).manager.check_invariants()
    runner.close()


def test_what_is_expected_has_to_be_right_all_the_same(mixtral):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner = make(model)
        for tokens, said in (([128], "token ids are 0 to 127"), ([1, 2], "one token each"), ([], "one token each")):
            chunks = [SequenceChunk([], 0, [0])]
            runner.expect(chunks)
            chunks[0].token_ids.extend(tokens)
            with pytest.raises(ConfigError, match=said):
                runner.run(chunks)
        beyond = [SequenceChunk([], 40, range(11))]
        runner.expect(beyond)
        beyond[0].token_ids.append(1)
        with pytest.raises(ConfigError, match="40 tokens at most, not 41"):
            runner.run(beyond)
        traffic = Traffic(runner, stock, seed=14)
        (sequence,) = begin(traffic, 1)
        traffic.run([(sequence, 1)])
        runner.close()


def test_a_pass_whose_logits_cannot_be_gathered_does_not_end_the_runner(mixtral, monkeypatch):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner, behind = make(model), []
        own, failures = runner._decode._logits_of, [torch.OutOfMemoryError("full")]

        def gathered(ready):
            if failures:
                raise failures.pop()
            return own(ready)

        monkeypatch.setattr(runner._decode, "_logits_of", gathered)
        logits = runner.run([SequenceChunk([5, 6], 0, [0])], None, behind.append)
        assert behind[0] is logits
        failures += [torch.OutOfMemoryError("full")] * 2
        with pytest.raises(EngineError, match="no memory left for a pass of 2 tokens"):
            runner.run([SequenceChunk([5, 6], 0, [0])], None, behind.append)
        assert len(behind) == 1
        traffic = Traffic(runner, stock, seed=16)
        traffic.run([(traffic.begin(2), 2)])
        runner.close()


def test_padding_is_routed_nowhere_and_counts_follow(mixtral):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner, total = make(model), offload_of(model).manager.counters.total
        traffic = Traffic(runner, stock, seed=3)
        sequences = begin(traffic, 3)
        before = total().misses
        traffic.run([(sequence, 1) for sequence in sequences])
        assert total().misses == before, "counted while the next one runs"
        ids = runner._decode.hostless.steps.path.record.device.ids
        assert ids.shape[1] == 32, "one path for all buckets"
        assert (ids[:, 3] == -1).all()
        assert (ids[:, :3] >= 0).all()
        runner.flush()
        chosen = sum(len(set(layer[:3].flatten().tolist())) for layer in ids)
        assert total().misses == before + chosen
        runner.close()


def test_a_pass_layer_by_layer_counts_the_step_before(mixtral):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner, manager = make(model), offload_of(model).manager
        traffic = Traffic(runner, stock, seed=9)
        (sequence,) = begin(traffic, 1)
        traffic.run([(sequence, 1)])  # on a GPU with passes before it that warm up
        runner.flush()
        learnt: list[str] = []
        for name in ("learn", "begin_step"):
            own = getattr(manager, name)
            setattr(manager, name, lambda *a, own=own, name=name: (learnt.append(name), own(*a))[1])
        traffic.run([(sequence, 1)])
        with layer_by_layer(runner):
            traffic.run([(sequence, 3)])
        assert learnt == ["begin_step", "learn", "begin_step"]
        runner.close()


def test_a_step_that_nobody_answers_is_given_up(mixtral, monkeypatch):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner = make(model, watchdog_s=0.3)
        traffic = Traffic(runner, stock, seed=4)
        (sequence,) = begin(traffic, 1)
        runner._decode.hostless.steps.split = only(0, 8)
        traffic.run([(sequence, 1)])
        with monkeypatch.context() as patch:
            patch.setattr(Mailboxes, "arm", lambda self: None)
            with pytest.raises(EngineError, match=r"layer 0 has not been answered within 0.3 s$"):
                traffic.run([(sequence, 1)])
        with pytest.raises(EngineError, match="given up: decode step"):
            traffic.run([(sequence, 1)])
        runner.close()
        other = Traffic(make(model), stock, seed=5)
        (sequence,) = begin(other, 1)
        other.run([(sequence, 1)])
        other.runner.close()
        offload_of(model).manager.check_invariants()


def test_a_failing_cpu_job_reaches_the_caller(mixtral):
    stock, folder = mixtral
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner = make(model)
        traffic = Traffic(runner, stock, seed=6)
        (sequence,) = begin(traffic, 1)
        steps = runner._decode.hostless.steps
        steps.split = only(0, 8)
        traffic.run([(sequence, 1)])
        addresses = steps.path.mailboxes._addresses[1]
        kept = addresses.copy()
        addresses[:] = 0
        place = sequence.done
        with pytest.raises(EngineError, match=r"^decode step \d+, layer 1: expert \d+ was chosen but has no"):
            traffic.run([(sequence, 1)])
        addresses[:] = kept
        sequence.done = place
        traffic.run([(sequence, 1)])
        runner.close()


def test_nothing_is_left_behind_when_it_cannot_be_made(mixtral, monkeypatch):
    _, folder = mixtral
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:

        def broken(*_args, **_others):
            raise RuntimeError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(decode, "bucket_for", broken)
            with pytest.raises(RuntimeError, match="no memory"):
                make(model)
        runner = make(model)
        runner.run([SequenceChunk([5], 0, [0])])
        runner.close()


# --- graphs


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 13, 32])
def test_every_bucket_replays_what_stock_computes(family, rows):
    stock, model = family
    runner = make(model)
    assert runner.eager_because is None
    traffic = Traffic(runner, stock, seed=rows)
    sequences = begin(traffic, rows)
    for _ in range(5):
        traffic.run([(sequence, 1) for sequence in sequences])
    assert runner._decode._buckets[decode.bucket_for(rows)].graph is not None
    runner.close()


@pytest.mark.cuda
def test_graphs_made_ahead_share_memory_and_are_all_right(family):
    stock, model = family
    runner = make(model)
    runner.prepare()
    graphs = {rows: bucket.graph for rows, bucket in runner._decode._buckets.items()}
    assert sorted(graphs) == [1, 2, 4, 8, 16, 32]
    traffic = Traffic(runner, stock, seed=7)
    sequences = begin(traffic, 9)
    for rows in (9, 1, 4, 2, 7, 9, 3):
        traffic.run([(sequence, 1) for sequence in sequences[-rows:]])
    assert graphs == {rows: bucket.graph for rows, bucket in runner._decode._buckets.items()}
    runner.close()
