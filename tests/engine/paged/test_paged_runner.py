"""PagedRunner: whatever is batched with what, each sequence gets the logits that stock transformers gives it alone."""

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from greenroom.engine.batch import SequenceChunk
from greenroom.engine.offload import offload_of
from greenroom.engine.paged.cache import block_bytes
from greenroom.engine.paged.probe import Kept, PagedModel, probe
from greenroom.engine.paged.runner import PagedRunner
from greenroom.engine.runners import make_runner
from greenroom.errors import ConfigError, EngineError, MemoryLimitError
from tests.engine.offloaded import offloaded, random_ids, saved_family
from tests.engine.paged.driver import Traffic
from tests.reference.families import FAMILIES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGED = [name for name in FAMILIES if name not in ("qwen3_next", "nemotron_h")]
LATENT = ("deepseek_v2", "deepseek_v3")


@pytest.fixture(scope="module", params=PAGED)
def family(request) -> Iterator[tuple[str, PreTrainedModel, PreTrainedModel]]:
    """Its name, the stock model and the offloaded one."""
    with saved_family(request.param) as (stock, folder), offloaded(folder, cache_expert_num=4, device=DEVICE) as model:
        yield request.param, stock.to(DEVICE), model


@pytest.fixture(scope="module")
def mixtral() -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    with saved_family("mixtral") as (stock, folder), offloaded(folder, cache_expert_num=4, device=DEVICE) as model:
        yield stock.to(DEVICE), model


def make(model: PreTrainedModel, **changed) -> PagedRunner:
    settings = {"num_blocks": 40, "block_size": 4, "max_tokens": 128, "max_context": 48} | changed
    runner = make_runner(model, **settings)
    assert isinstance(runner, PagedRunner)
    if runner._decode is not None:
        runner._decode.max_rows = 1  # larger graphs are test_decode_buckets' matter: each takes seconds to make
    return runner


@pytest.mark.parametrize("block_size", [4, 16])
def test_random_traffic(family, block_size):
    _, stock, model = family
    runner = make(model, block_size=block_size)
    traffic = Traffic(runner, stock, seed=block_size)
    for _ in range(10):
        traffic.step(most=4 if block_size == 4 else 6)
    assert traffic.begun > 6, "blocks are used again"
    runner.close()
    offload_of(model).manager.check_invariants()


@torch.no_grad()
def test_greedy_decode_beside_others(family):
    _, stock, model = family
    runner = make(model)
    prompts = [random_ids(1, length, seed=length).to(DEVICE) for length in (3, 17, 8)]
    new = 6
    expected = [stock.generate(ids, max_new_tokens=new, do_sample=False)[0].tolist() for ids in prompts]
    tokens = [ids[0].tolist() for ids in prompts]
    blocks = [range(6 * row, 6 * row + 6) for row in range(3)]
    done = [0, 0, 0]
    for _ in range(new):
        rows = [
            SequenceChunk(own[count:], count, own_blocks)
            for own, count, own_blocks in zip(tokens, done, blocks, strict=True)
        ]
        done = [len(own) for own in tokens]
        for own, token in zip(tokens, runner.run(rows).argmax(-1).tolist(), strict=True):
            own.append(token)
    assert tokens == expected
    runner.close()


def test_the_model_is_as_before(family):
    _, stock, model = family
    ids = random_ids(2, 9).to(DEVICE)
    before = model.config._attn_implementation
    runner = make(model)
    runner.run([SequenceChunk([5, 6, 7], 0, [3])])
    assert model.config._attn_implementation == before
    options = {"max_new_tokens": 4, "do_sample": False}
    assert model.generate(ids, **options).tolist() == stock.generate(ids, **options).tolist()
    runner.close()


def test_what_a_layer_keeps(family):
    name, stock, model = family
    kept = probe(model)
    assert isinstance(kept, PagedModel)
    assert kept.kept == (Kept.LATENT if name in LATENT else Kept.PLAIN)
    with torch.no_grad():
        cache = stock(random_ids(1, 5).to(DEVICE), use_cache=True)
    cache = getattr(cache, "cache", None) or cache.past_key_values
    nbytes = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    assert block_bytes(kept.shapes, 5) == nbytes


def test_probing_counts_nothing(mixtral):
    _, model = mixtral
    before = offload_of(model).manager.counters.total()
    probe(model)
    assert offload_of(model).manager.counters.total() == before


def test_a_prefix_may_be_shared(mixtral):
    stock, model = mixtral
    runner = make(model)
    prefix, tails = random_ids(1, 8, seed=1)[0].tolist(), random_ids(2, 5, seed=2).tolist()
    runner.run([SequenceChunk(prefix, 0, [9, 2])])
    logits = runner.run([SequenceChunk(tails[0], 8, [9, 2, 30, 31]), SequenceChunk(tails[1], 8, [9, 2, 17, 4])])
    with torch.no_grad():
        expected = stock(torch.tensor([prefix + tail for tail in tails], device=DEVICE)).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
    runner.close()


def test_every_token_of_a_batch_is_counted_once(mixtral):
    _, model = mixtral
    runner, manager = make(model), offload_of(model).manager
    routed: list[int] = []
    admission = manager.admission
    record, record_all = admission.record, admission.record_all

    def counting(layer, ids, weights, counts, valid):
        routed.append(int(counts.sum()))
        assert valid is None
        record(layer, ids, weights, counts, valid)

    def counting_all(ids, weights):
        routed.extend(int((layer >= 0).sum()) for layer in ids)
        return record_all(ids, weights)

    admission.record, admission.record_all = counting, counting_all
    try:
        runner.run([SequenceChunk([5], 0, [0]), SequenceChunk([5, 6, 7], 0, [1]), SequenceChunk([8] * 6, 0, [2, 3])])
    finally:
        del admission.record, admission.record_all
    assert routed == [10 * 2] * 2  # tokens, choices; layers
    runner.close()


# --- memory


def test_blocks_from_bytes(mixtral):
    _, model = mixtral
    kept = probe(model)
    size = block_bytes(kept.shapes, 16)
    assert size == 16 * 2 * 2 * (2 * 12) * 4  # tokens, layers, keys and values, heads times width, float32
    runner = make_runner(model, kv_bytes=6 * size + 5, max_tokens=8, max_context=64)
    assert (runner.block_size, runner.num_blocks, runner.max_sequences) == (16, 5, 32)
    assert sum(t.numel() * t.element_size() for t in runner.kv_tensors) == 6 * size
    runner.close()


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"kv_bytes": None, "num_blocks": None}, ConfigError, "either kv_bytes or num_blocks"),
        ({"kv_bytes": 1 << 20, "num_blocks": 9}, ConfigError, "either kv_bytes or num_blocks"),
        ({"num_blocks": 3}, MemoryLimitError, "a sequence of 64 tokens needs .* bytes of KV cache, .* are there"),
        ({"kv_bytes": 100}, MemoryLimitError, "allow more, or shorter sequences"),
        ({"num_blocks": 9, "block_size": 0}, ConfigError, "at least 1"),
        ({"num_blocks": 9, "max_tokens": 0}, ConfigError, "at least 1"),
    ],
)
def test_settings_that_make_no_sense(mixtral, settings, error, said):
    with pytest.raises(error, match=said):
        make_runner(mixtral[1], **{"max_tokens": 8, "max_context": 64} | settings)


# --- what goes wrong


def test_bad_chunks_harm_nobody(mixtral):
    stock, model = mixtral
    traffic = Traffic(make(model), stock, seed=5)
    sequence = traffic.begin(20)
    traffic.run([(sequence, 7)])
    for chunk in (SequenceChunk([1], 0, [99]), SequenceChunk([500], 0, [0]), SequenceChunk([1] * 49, 0, range(13))):
        with pytest.raises(ConfigError):
            traffic.runner.run([chunk])
    traffic.run([(sequence, 13)])
    traffic.runner.close()


class Broken(Exception):
    pass


def test_an_error_within_a_pass_leaves_the_model_usable(mixtral, monkeypatch):
    stock, model = mixtral
    runner = make(model)
    traffic, before = Traffic(runner, stock, seed=6), model.config._attn_implementation

    def broken(*_args, **_others):
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(model.model.norm, "forward", broken)
        with pytest.raises(Broken):
            runner.run([SequenceChunk([5, 6], 0, [3])])
    assert model.config._attn_implementation == before
    for _ in range(3):
        traffic.step(most=2)
    runner.close()


def test_a_pass_without_memory_is_an_engine_error(mixtral, monkeypatch):
    stock, model = mixtral
    runner = make(model)

    def full(*_args, **_others):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(model.model.norm, "forward", full)
        with pytest.raises(EngineError, match="no memory left for a pass of 2 tokens"):
            runner.run([SequenceChunk([5, 6], 0, [3])])
    Traffic(runner, stock, seed=8).step(most=2)
    with monkeypatch.context() as patch:
        patch.setattr(PagedRunner, "__init__", full)
        with pytest.raises(MemoryLimitError, match=r"no memory left for \d+ bytes of KV cache"):
            make(model)
    runner.close()


def test_closing_the_model_closes_its_runners():
    with saved_family("mixtral") as (_, folder), offloaded(folder, device=DEVICE) as model:
        runner = make(model)
    with pytest.raises(EngineError, match="the runner is closed"):
        runner.run([SequenceChunk([5], 0, [0])])


def test_closed(mixtral):
    runner = make(mixtral[1])
    for _ in range(2):
        runner.close()
    runner.flush()
    for call in (lambda: runner.run([SequenceChunk([5], 0, [0])]), runner.prepare):
        with pytest.raises(EngineError, match="the runner is closed"):
            call()


def test_the_cpu_has_no_graphs(mixtral):
    if DEVICE == "cpu":
        runner = make(mixtral[1])
        assert runner.eager_because == "the model runs on the CPU, which has no graphs"
        runner.prepare()
        runner.close()


# --- copies of blocks


@torch.no_grad()
def test_a_copied_block_serves_another_sequence(family):
    """It agrees in its first tokens only; the rest is overwritten."""
    _, stock, model = family
    runner = make(model)
    first = random_ids(1, 7, seed=3)[0].tolist()
    other = [*first[:6], *random_ids(1, 3, seed=4)[0].tolist()]
    runner.run([SequenceChunk(first, 0, [0, 1])])
    runner.copy_block(1, 5)
    row = runner.run([SequenceChunk(other[6:], 6, [0, 5, 7])])[0]
    ids = torch.tensor([other], device=DEVICE)
    torch.testing.assert_close(row.float(), stock(ids).logits[0, -1].float(), rtol=2e-4, atol=2e-4)
    again = runner.run([SequenceChunk(first[6:], 6, [0, 1])])[0]
    ids = torch.tensor([first], device=DEVICE)
    torch.testing.assert_close(again.float(), stock(ids).logits[0, -1].float(), rtol=2e-4, atol=2e-4)
    runner.close()
    with pytest.raises(EngineError, match="closed"):
        runner.copy_block(1, 5)
