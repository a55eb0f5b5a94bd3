"""ExclusiveRunner: models whose cache is more than keys and values, one sequence at a time."""

import pytest
import torch

from greenroom.engine.batch import SequenceChunk
from greenroom.engine.offload import offload_of
from greenroom.engine.paged.exclusive import ExclusiveRunner
from greenroom.engine.runners import make_runner
from greenroom.errors import ConfigError, EngineError
from tests.engine.offloaded import offloaded, random_ids, saved_family
from tests.engine.paged.driver import Traffic

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module", params=["qwen3_next", "nemotron_h"])
def family(request):
    with saved_family(request.param) as (stock, folder), offloaded(folder, cache_expert_num=4, device=DEVICE) as model:
        yield stock.to(DEVICE), model


@pytest.fixture
def runner(family):
    made = make_runner(family[1], max_tokens=32, max_context=64)
    yield made
    made.close()


def test_what_it_takes(runner):
    assert isinstance(runner, ExclusiveRunner)
    assert (runner.max_sequences, runner.max_tokens, runner.num_blocks * runner.block_size) == (1, 32, 64)


def test_sequences_in_chunks_one_after_another(family, runner):
    traffic = Traffic(runner, family[0], seed=3, atol=2e-3)  # states are summed chunk by chunk
    for counts in ((9, 1, 1, 8, 1), (1, 1), (20,)):
        sequence = traffic.begin(sum(counts))
        for count in counts:
            traffic.run([(sequence, count)])
        traffic.end(sequence)
    offload_of(family[1]).manager.check_invariants()


def test_what_it_does_not_take(runner):
    ids, blocks = random_ids(1, 6)[0].tolist(), range(4)
    with pytest.raises(ConfigError, match="continues one sequence, at token 0, not at 3; start others at 0"):
        runner.run([SequenceChunk(ids, 3, blocks)])
    runner.run([SequenceChunk(ids, 0, blocks)])
    with pytest.raises(ConfigError, match="continues one sequence, at token 6, not at 3"):
        runner.run([SequenceChunk(ids, 3, blocks)])
    with pytest.raises(ConfigError, match="1 to 1 sequences, not 2"):
        runner.run([SequenceChunk(ids, 0, blocks)] * 2)
    runner.run([SequenceChunk(ids, 6, blocks)])


class Broken(Exception):
    pass


def test_a_sequence_is_lost_when_a_pass_fails(family, runner, monkeypatch):
    ids, blocks = random_ids(1, 6)[0].tolist(), range(4)
    expected = runner.run([SequenceChunk(ids, 0, blocks)])

    def broken(*_args, **_others):
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(family[1].lm_head, "forward", broken)
        with pytest.raises(Broken):
            runner.run([SequenceChunk(ids, 6, blocks)])
    with pytest.raises(ConfigError, match="start others at 0"):
        runner.run([SequenceChunk(ids, 6, blocks)])
    torch.testing.assert_close(runner.run([SequenceChunk(ids, 0, blocks)]), expected, rtol=1e-4, atol=1e-5)


def test_closed(runner):
    for _ in range(2):
        runner.close()
    with pytest.raises(EngineError, match="the runner is closed"):
        runner.run([SequenceChunk([5], 0, [0])])


def test_there_are_no_blocks_to_copy(runner):
    with pytest.raises(EngineError, match="not made of blocks"):
        runner.copy_block(0, 1)
