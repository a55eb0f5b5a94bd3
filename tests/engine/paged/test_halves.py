"""DBO: a pass of one token a sequence as two halves at once gives what stock transformers gives, and is one step.

Without a GPU Triton's interpreter runs one half after the other; what two streams do is for the tests with a GPU, and
for ``tests/experts/test_halves.py``.
"""

import itertools
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from greenroom.engine.batch import SequenceChunk
from greenroom.engine.dbo import DboPolicy
from greenroom.engine.offload import offload_of
from greenroom.engine.paged.packing import Limits, pack
from greenroom.engine.paged.probe import PagedModel, probe
from greenroom.engine.paged.runner import PagedRunner
from greenroom.engine.runners import make_runner
from greenroom.errors import ConfigError, EngineError
from tests.engine.offloaded import offloaded, random_ids, saved_family
from tests.engine.paged.driver import Growing, Traffic

pytest.importorskip("triton")

from greenroom.engine.paged.decode import DecodeBuckets
from tests.experts.test_decode_path import only
from tests.reference.interpreted import few_large_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = Limits(block_size=4, num_blocks=160, max_sequences=32, max_tokens=256, max_context=40, vocabulary=128)
FAMILIES = {"mixtral": (1, 8, 13), "gpt_oss": (3,), "granitemoe": (2,), "deepseek_v2": (5,)}
# The interpreter takes half a second a row: without a GPU each family meets some numbers of rows.
CASES = [
    (family, rows) for family, few in FAMILIES.items() for rows in ((1, 2, 3, 5, 8, 13) if DEVICE == "cuda" else few)
]


@pytest.fixture(autouse=True)
def quick_interpreter(monkeypatch):
    few_large_tiles(monkeypatch)


@pytest.fixture(scope="module")
def saved() -> Iterator[dict[str, tuple[PreTrainedModel, Path]]]:
    """Stock models of all families, and the folders that they were saved to."""
    contexts = {family: saved_family(family) for family in FAMILIES}
    yield {family: (stock.to(DEVICE), folder) for family, (stock, folder) in _entered(contexts).items()}
    for context in contexts.values():
        context.__exit__(None, None, None)


def _entered(contexts):
    return {name: context.__enter__() for name, context in contexts.items()}


def make(model: PreTrainedModel, dbo: str = "on", limits: Limits = LIMITS, **options) -> PagedRunner:
    kept = probe(model)
    assert isinstance(kept, PagedModel)
    return PagedRunner(model, kept, limits, decode_path=True, dbo=dbo, **options)


def begin(traffic: Traffic, rows: int, prompt: int = 3) -> list[Growing]:
    """``rows`` sequences of different lengths whose prompts have been run."""
    sequences = [traffic.begin(prompt + row % 5 + 14) for row in range(rows)]
    # Many at once: a pass of few tokens takes the interpreter long.
    traffic.run([(sequence, prompt + row % 5) for row, sequence in enumerate(sequences)])
    return sequences


def split(model: PreTrainedModel, runner: PagedRunner, tenths: int) -> None:
    """Of absent experts, so many tenths cross PCIe from here on."""
    runner._decode.hostless.steps.split = only(tenths, max(offload_of(model).manager.store.num_experts))


def halves_of(runner: PagedRunner) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices that either half has noted: int32 [layers, rows, K]."""
    hostless = runner._decode.hostless
    return hostless.steps.path.record.device.ids, hostless._second.record.device.ids


@pytest.mark.parametrize(("family", "rows"), CASES)
def test_logits_equal_stock(saved, family, rows):
    stock, folder = saved[family]
    with offloaded(folder, cache_expert_num=3, device=DEVICE) as model:
        runner = make(model)
        traffic = Traffic(runner, stock, seed=rows)
        sequences = begin(traffic, rows, prompt=33 // rows if rows < 8 else 3)
        for tenths in (0, 5, 10) if DEVICE == "cuda" else (5,):
            split(model, runner, tenths)
            for _ in range(2 if DEVICE == "cuda" or rows < 5 else 1):
                traffic.run([(sequence, 1) for sequence in sequences])
        first, second = halves_of(runner)
        if rows > 1:
            own = rows - rows // 2
            assert (first[:, :own] >= 0).all()
            assert (second[:, : rows - own] >= 0).all()
            # Behind them the buckets of both halves are padding, which is routed nowhere.
            half = next(size for size in (1, 2, 4, 8) if size >= own)
            assert (first[:, own:half] == -1).all()
            assert (second[:, rows - own : half] == -1).all()
        runner.flush()
        offload_of(model).manager.check_invariants()
        runner.close()


def test_a_pass_of_one_token_has_no_halves(saved):
    stock, folder = saved["mixtral"]
    with offloaded(folder, cache_expert_num=3, device=DEVICE) as model:
        runner = make(model)
        traffic = Traffic(runner, stock, seed=1)
        (sequence,) = begin(traffic, 1, prompt=9)
        begun = watch_begin(runner)
        traffic.run([(sequence, 1)])
        assert begun[-1] == (1, None)
        runner.close()


def watch_begin(runner: PagedRunner) -> list[tuple[int, int | None]]:
    """Collects how many rows each half of the coming steps has."""
    steps, begun = runner._decode.hostless.steps, []
    own = steps.begin
    steps.begin = lambda rows, second=None, **others: (begun.append((rows, second)), own(rows, second, **others))[1]
    return begun


def test_tokens_that_see_each_other_stay_together(saved):
    """Of a chunk of several tokens, each attends to keys that the same layer has just written for those before it."""
    stock, folder = saved["mixtral"]
    with offloaded(folder, cache_expert_num=3, device=DEVICE) as model:
        runner = make(model)
        traffic = Traffic(runner, stock, seed=2)
        first, second = begin(traffic, 2, prompt=17)
        begun = watch_begin(runner)
        traffic.run([(first, 3), (second, 1)])
        assert all(rows_of_second is None for _, rows_of_second in begun)
        traffic.run([(first, 1), (second, 1)])
        assert begun[-1] == (1, 1)
        runner.close()


def test_statistics_are_those_of_one_batch(saved):
    """Both ways the same tokens take the same step; only what ran where, and how often, may differ."""
    stock, folder = saved["mixtral"]
    seen = {}
    for dbo in ("off", "on"):
        with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
            runner, manager = make(model, dbo), offload_of(model).manager
            traffic = Traffic(runner, stock, seed=3)
            sequences = begin(traffic, 3, prompt=11)
            learnt = []
            own = manager.learn
            manager.learn = lambda record, own=own, learnt=learnt: (learnt.append(record), own(record))[1]
            before = manager.counters.total()
            traffic.run([(sequence, 1) for sequence in sequences])
            runner.flush()
            usage = manager.admission.usage
            misses = manager.counters.total().misses - before.misses
            seen[dbo] = (usage.frequency.copy(), usage.total.copy(), usage.last_used.copy(), learnt, misses)
            runner.close()
    for one, two in zip(seen["off"][:3], seen["on"][:3], strict=True):
        assert one.any()
        torch.testing.assert_close(torch.from_numpy(one), torch.from_numpy(two))
    for whole, halved in zip(seen["off"][3], seen["on"][3], strict=True):
        assert (whole.ids == halved.ids).all()
        torch.testing.assert_close(torch.from_numpy(whole.weights), torch.from_numpy(halved.weights))
        # Three tokens are two and one; an expert that both halves need counts twice.
        both = [[len(set(part.flatten())) for part in (ids[:2], ids[2:])] for ids in halved.ids]
        assert halved.lanes.sum(axis=1).tolist() == [sum(counts) for counts in both]
        assert whole.lanes.sum(axis=1).tolist() == [len(set(ids.flatten())) for ids in whole.ids]
    assert seen["on"][4] > seen["off"][4]


def test_a_failure_in_the_second_half_names_step_half_and_layer(saved):
    stock, folder = saved["mixtral"]
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner = make(model)
        traffic = Traffic(runner, stock, seed=4)
        sequences = begin(traffic, 3, prompt=11)
        hostless = runner._decode.hostless
        split(model, runner, 0)
        traffic.run([(sequence, 1) for sequence in sequences])
        places = [sequence.done for sequence in sequences]
        addresses = hostless._second.mailboxes._addresses[1]
        kept = addresses.copy()
        addresses[:] = 0
        number = hostless.steps._number
        with pytest.raises(
            EngineError, match=rf"^decode step {number}, second half, layer 1: expert \d+ was chosen but"
        ):
            traffic.run([(sequence, 1) for sequence in sequences])
        addresses[:] = kept
        for sequence, place in zip(sequences, places, strict=True):
            sequence.done = place
        traffic.run([(sequence, 1) for sequence in sequences])
        runner.close()


def test_a_second_half_that_nobody_answers_is_given_up(saved, monkeypatch):
    stock, folder = saved["mixtral"]
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner = make(model, watchdog_s=0.5 if DEVICE == "cuda" else 3.0)
        traffic = Traffic(runner, stock, seed=5)
        sequences = begin(traffic, 2, prompt=17)
        hostless = runner._decode.hostless
        split(model, runner, 0)
        traffic.run([(sequence, 1) for sequence in sequences])
        with monkeypatch.context() as patch:
            patch.setattr(hostless._second.mailboxes, "arm", lambda: None)
            with pytest.raises(EngineError, match=r"second half, layer 0 has not been answered within \d"):
                traffic.run([(sequence, 1) for sequence in sequences])
        with pytest.raises(EngineError, match="given up: decode step"):
            traffic.run([(sequence, 1) for sequence in sequences])
        runner.close()
        offload_of(model).manager.check_invariants()
        again = Traffic(make(model), stock, seed=6)
        again.run([(sequence, 1) for sequence in begin(again, 2, prompt=17)])
        again.runner.close()


def test_passes_that_were_expected(saved):
    stock, folder = saved["mixtral"]
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner = make(model)
        traffic = Traffic(runner, stock, seed=15)
        sequences = begin(traffic, 3)
        traffic.run([(sequence, 1) for sequence in sequences], then=sequences)
        traffic.run([(sequence, 1) for sequence in sequences], then=sequences)
        halves, runner.dbo.halves = runner.dbo.halves, lambda rows: False  # decided otherwise meanwhile
        traffic.run([(sequence, 1) for sequence in sequences], then=sequences)
        runner.dbo.halves = halves
        traffic.run([(sequence, 1) for sequence in sequences])
        runner.close()


class Clock:
    """Winds on by what a pass takes each way; reads as a clock does."""

    def __init__(self, decode: DecodeBuckets, whole: float, halves: float) -> None:
        self.now, self.ways = 0.0, []
        own = decode._run

        def run(work, division, **others):
            own(work, division, **others)
            self.ways.append(division.halves)
            self.now += halves if division.halves else whole

        decode._run = run

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("whole", "halves"), [(1.0, 1.5), (1.5, 1.0)])
def test_auto_keeps_what_was_faster(saved, whole, halves, caplog, monkeypatch):
    _, folder = saved["mixtral"]
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner = make(model, "off")
        policy = DboPolicy("auto", [2, 8])
        decode = DecodeBuckets(
            model, runner._cache, 32, LIMITS.max_context, graph=DEVICE == "cuda", watchdog_s=30.0, dbo=policy
        )
        clock = Clock(decode, whole, halves)
        decode._clock = clock
        if DEVICE == "cpu":
            # What is computed is for the other tests; here it is about which way.
            monkeypatch.setattr(decode, "_forward", lambda *_: lambda: None)
            monkeypatch.setattr(decode, "_logits", torch.zeros(32, LIMITS.vocabulary))
        packing = pack([SequenceChunk([5 + row], 0, [row]) for row in range(6)], LIMITS)
        few = pack([SequenceChunk([5], 0, [0]), SequenceChunk([6], 0, [1])], LIMITS)
        assert decode._hostless._second is not None
        with caplog.at_level(logging.INFO, "greenroom"):
            for _ in range(20):
                decode.run(few)
                decode.run(packing)
        choice = policy.choice(8)
        assert choice.halves == (halves < whole)
        assert (choice.whole_ms, choice.halves_ms) == (whole * 1e3, halves * 1e3)
        assert policy.may_halve(8) == choice.halves
        assert not policy.may_halve(2), "two sequences are too few to try"
        assert (
            "decode passes of up to 8 tokens: " + ("as two halves" if choice.halves else "in one piece") in caplog.text
        )
        assert f"halves {halves * 1e3:.2f} ms" in caplog.text
        assert (decode._hostless._second is None) == (not choice.halves), "what only halves need is freed"
        assert len(clock.ways) >= 40
        del clock.ways[:]
        decode.run(packing)
        assert clock.ways[-1] == choice.halves
        decode.close()
        runner.close()


# --- what cannot be


def test_it_is_refused_where_nothing_can_run_as_halves(saved):
    _, folder = saved["mixtral"]
    alone = Limits(**{**vars(LIMITS), "max_sequences": 1})
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        with pytest.raises(ConfigError, match="dbo cannot be on: batches have fewer than 2 sequences"):
            make(model, limits=alone)
        with pytest.raises(ConfigError, match="dbo is auto, on or off, not 'yes'"):
            make(model, "yes")
        kept = probe(model)
        assert isinstance(kept, PagedModel)
        if DEVICE == "cpu":
            with pytest.raises(ConfigError, match=r"cannot be on: decode steps are no graphs, since the model runs on"):
                PagedRunner(model, kept, LIMITS, dbo="on")
            automatic = PagedRunner(model, kept, LIMITS, dbo="auto")
            assert str(automatic.dbo).startswith("off: decode steps are no graphs")
            assert not automatic.dbo.in_use
            automatic.close()


def test_prefetched_weights_run_one_pass_at_a_time(saved):
    _, folder = saved["mixtral"]
    with offloaded(folder, cache_expert_num=0, device=DEVICE, weights_offload_group_size=1) as model:
        with pytest.raises(ConfigError, match=r"cannot be on: weights that are prefetched \("):
            make(model)
        runner = make(model, "auto")
        assert runner.dbo.off_because is not None
        assert runner._decode.hostless._second is None
        runner.close()


def test_models_that_run_one_sequence_refuse_it():
    with saved_family("qwen3_next") as (_, folder), offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        with pytest.raises(ConfigError, match="dbo cannot be on: one sequence at a time"):
            make_runner(model, max_tokens=32, max_context=64, dbo="on")
        make_runner(model, max_tokens=32, max_context=64, dbo="auto").close()


def test_auto_does_without_halves_when_memory_is_short(saved, monkeypatch):
    _, folder = saved["mixtral"]

    def none_left(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("greenroom.engine.hostless_steps.HostlessSteps.open_second", none_left)
    with offloaded(folder, cache_expert_num=0, device=DEVICE) as model:
        runner = make(model, "off")
        policy = DboPolicy("auto", [8])
        arguments = (model, runner._cache, 32, LIMITS.max_context)
        decode = DecodeBuckets(*arguments, graph=False, watchdog_s=30.0, dbo=policy)
        assert str(policy) == "off: the GPU has no memory left for what a second half needs"
        assert not policy.in_use
        decode.close()
        with pytest.raises(torch.OutOfMemoryError):
            DecodeBuckets(*arguments, graph=False, watchdog_s=30.0, dbo=DboPolicy("on", [8]))
        runner.close()


# --- graphs


@pytest.mark.cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_made_ahead_are_all_right(saved, family):
    stock, folder = saved[family]
    with offloaded(folder, cache_expert_num=3, device=DEVICE) as model:
        runner = make(model)
        runner.prepare()
        made = {rows: bucket.halves_graph for rows, bucket in runner._decode._buckets.items()}
        assert sorted(rows for rows, graph in made.items() if graph is not None) == [2, 4, 8, 16, 32]
        traffic = Traffic(runner, stock, seed=7)
        sequences = begin(traffic, 17)
        for rows in (17, 1, 4, 2, 7, 16, 9, 3, 8):
            traffic.run([(sequence, 1) for sequence in sequences[-rows:]])
        assert made == {rows: bucket.halves_graph for rows, bucket in runner._decode._buckets.items()}
        runner.close()


@pytest.mark.cuda
@pytest.mark.parametrize("slots", [0, 8])
@pytest.mark.parametrize(("rows", "tenths"), [*itertools.product([2, 5, 16], [0, 5, 10])])
def test_a_replay_equals_the_same_work_done_eagerly(saved, slots, rows, tenths):
    stock, folder = saved["mixtral"]
    with offloaded(folder, cache_expert_num=slots, device=DEVICE) as model:
        runner = make(model)
        traffic = Traffic(runner, stock, seed=8)
        sequences = begin(traffic, rows)
        decode = runner._decode
        split(model, runner, tenths)
        # The same tokens again and again: they write the same keys into the same places.
        chunks = [sequence.next_chunk(1, runner.block_size, traffic.pool) for sequence in sequences]
        replayed = [runner.run(chunks).clone() for _ in range(3)]
        bucket = decode._buckets[next(size for size in (2, 4, 8, 16) if size >= rows)]
        assert bucket.halves_graph is not None
        graph, bucket.halves_graph, decode._use_graph = bucket.halves_graph, None, False
        eager = runner.run(chunks).clone()
        bucket.halves_graph, decode._use_graph = graph, True
        for logits in (*replayed, runner.run(chunks)):
            assert torch.equal(logits, eager)
        runner.close()


@pytest.mark.cuda
def test_delays_of_either_half_change_nothing(saved):
    """The CPU engine's speed changes from step to step, so that either half waits for the other's jobs, or does not."""
    stock, folder = saved["mixtral"]
    with offloaded(folder, cache_expert_num=2, device=DEVICE) as model:
        runner, engine, rng = make(model), offload_of(model).engine, random.Random(9)
        traffic = Traffic(runner, stock, seed=9)
        sequences = begin(traffic, 16)
        for _ in range(12):
            engine.throttle(rng.choice([1.0, 1.0, 20.0, 300.0]))
            split(model, runner, rng.choice([0, 3, 5, 10]))
            taking = rng.sample(sequences, rng.randint(1, 16))
            traffic.run([(sequence, 1) for sequence in taking])
        engine.throttle(1.0)
        runner.flush()
        offload_of(model).manager.check_invariants()
        runner.close()


@pytest.mark.cuda
def test_auto_measures_and_frees_the_loser(saved):
    _, folder = saved["mixtral"]
    with offloaded(folder, cache_expert_num=8, device=DEVICE) as model:
        runner = make_runner(
            model, num_blocks=160, block_size=4, max_tokens=256, max_context=40, max_sequences=8, dbo="auto"
        )
        runner.prepare()
        chunks = [SequenceChunk(random_ids(1, 1, row)[0].tolist(), 0, (row,)) for row in range(8)]
        for _ in range(64):
            runner.run(chunks)
        (choice,) = runner.dbo.choices
        assert choice.rows == 8
        assert choice.halves is not None
        assert choice.whole_ms > 0
        assert choice.halves_ms > 0
        bucket = runner._decode._buckets[8]
        assert (bucket.halves_graph is None) == (not choice.halves)
        assert (runner._decode.hostless._second is None) == (not choice.halves)
        runner.run(chunks)
        runner.close()
