"""The pass before the first request: as large as any, and without a trace."""

from types import SimpleNamespace

import pytest
import torch

import greenroom
from greenroom.engine.batch import SequenceChunk
from greenroom.engine.offload import offload_of
from greenroom.engine.paged.runner import PagedRunner
from greenroom.engine.runners import make_runner
from greenroom.errors import EngineError
from greenroom.serving.rehearsal import largest_pass, rehearse
from tests.serving.test_open_engine import FOLDER


@pytest.mark.parametrize(
    ("max_tokens", "max_context", "blocks", "sequences", "expected"),
    [
        (2048, 4096, 1000, 8, [2048]),
        (2048, 1000, 1000, 8, [1000, 1000, 48]),
        (2048, 1000, 1000, 2, [1000, 1000]),
        (2048, 4096, 100, 8, [1600]),
        (100, 90, 6, 8, [90]),
        (1, 90, 6, 8, [1]),
    ],
)
def test_the_largest_pass(max_tokens, max_context, blocks, sequences, expected):
    limits = SimpleNamespace(
        max_tokens=max_tokens, max_context=max_context, num_blocks=blocks, max_sequences=sequences, block_size=16
    )
    chunks = largest_pass(limits, 50)
    assert [len(chunk.token_ids) for chunk in chunks] == expected
    assert {token for chunk in chunks for token in chunk.token_ids} == set(range(min(50, len(chunks[0].token_ids))))
    used = [block for chunk in chunks for block in chunk.blocks]
    assert len(used) == len(set(used))
    assert all(block < blocks for block in used)
    assert all(len(chunk.token_ids) <= 16 * len(chunk.blocks) for chunk in chunks)


def test_it_leaves_no_trace():
    model, tokenizer = greenroom.load(FOLDER, dtype="float32", progress=False, cache_expert_num=4, device="cpu")
    try:
        manager = offload_of(model).manager
        ids = tokenizer("And it came to pass in those days")["input_ids"]

        def first(rehearsed: bool) -> torch.Tensor:
            runner = make_runner(model, max_tokens=64, max_context=256, num_blocks=16, max_sequences=2)
            assert isinstance(runner, PagedRunner)
            if rehearsed:
                before = manager.counters.table(), manager.cache.slot_of.copy()
                rehearse(model, runner)
                assert (manager.counters.table() == before[0]).all()
                assert (manager.cache.slot_of == before[1]).all()
            logits = runner.run([SequenceChunk(ids, 0, [0])]).clone()
            runner.close()
            return logits

        assert torch.equal(first(rehearsed=True), first(rehearsed=False))
    finally:
        greenroom.close(model)


def test_what_fails_in_it_fails_before_the_first_request(monkeypatch):
    model, _ = greenroom.load(FOLDER, dtype="float32", progress=False, cache_expert_num=4, device="cpu")
    try:
        runner = make_runner(model, max_tokens=64, max_context=256, num_blocks=16, max_sequences=2)

        def too_large(*_: object) -> None:
            raise torch.OutOfMemoryError

        monkeypatch.setattr(runner, "_run_layer_by_layer", too_large)
        with pytest.raises(EngineError, match="no memory left for a pass of 64 tokens; allow fewer"):
            rehearse(model, runner)
    finally:
        greenroom.close(model)
