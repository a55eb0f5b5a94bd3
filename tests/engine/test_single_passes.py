"""Decode of one sequence on a CPU: what the CPU engine does of it, and how well."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from greenroom.engine import single
from greenroom.engine.attach import RoutedExperts
from greenroom.engine.batch import BatchRunner, SequenceChunk
from greenroom.engine.offload import offload_of
from greenroom.engine.runners import make_runner
from greenroom.engine.single import parts
from greenroom.engine.single.linears import torch_multiplies
from greenroom.errors import EngineError
from greenroom.experts.cpu import CpuExperts
from tests.engine.offloaded import offloaded, random_ids, saved_family
from tests.reference.families import FAMILIES

BF16 = torch.bfloat16
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[True, False], ids=["torch has kernels", "torch has none"])
def has_kernels(request, monkeypatch):
    """Whether torch has kernels for the model's dtype on this processor, by its own account."""
    monkeypatch.setattr(single, "torch_multiplies", lambda _: request.param)
    return request.param


@pytest.fixture
def with_kernels(monkeypatch):
    monkeypatch.setattr(single, "torch_multiplies", lambda _: True)


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(single, "torch_multiplies", lambda _: False)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    """Shapes of what the engine multiplies inside the block."""
    shapes: list[torch.Size] = []
    linear = CpuExperts.linear

    def noted(self, weight, x, bias=None, out=None):
        shapes.append(x.shape)
        return linear(self, weight, x, bias, out)

    with monkeypatch.context() as patch:
        patch.setattr(CpuExperts, "linear", noted)
        yield shapes


@contextmanager
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often inside the block the engine or its library did what a model does between its products."""
    count: Counter[str] = Counter()

    def counting(owner: object, name: str) -> None:
        function = getattr(owner, name)

        def noted(*args):
            count[name] += 1
            return function(*args)

        patch.setattr(owner, name, noted)

    with monkeypatch.context() as patch:
        for name in ("norm", "turn", "choose"):
            counting(parts, name)
        counting(CpuExperts, "attend")
        yield count


@contextmanager
def rows_of_dense_layers(model: nn.Module) -> Iterator[list[int]]:
    """What the model's own dense layers are given inside the block, each time that one runs."""
    rows: list[int] = []
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    hooks = [layer.register_forward_hook(lambda _, x, __: rows.append(x[0].shape[:-1].numel())) for layer in layers]
    yield rows
    for hook in hooks:
        hook.remove()


# With and without biases, with shared experts, with latent attention.
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen2_moe", "deepseek_v3"])
@pytest.mark.usefixtures("with_kernels")
@torch.no_grad()
def test_a_token_alone_goes_through_the_engine_and_nothing_else_does(family, monkeypatch):
    with saved_family(family, BF16) as (_, folder), offloaded(folder, device="cpu") as model:
        cache = DynamicCache(config=model.config)
        with counted(monkeypatch) as shapes:
            model(input_ids=random_ids(1, 7), past_key_values=cache)
            model(input_ids=random_ids(2, 1))
            with torch.enable_grad():
                model(input_ids=random_ids(1, 1))
        assert shapes == []
        with counted(monkeypatch) as shapes, rows_of_dense_layers(model) as rows:
            model(input_ids=random_ids(1, 1), past_key_values=cache)
        assert all(shape.numel() == shape[-1] for shape in shapes)
        # A family that caches latents multiplies all of them. A softmax router is no plain dense layer, and goes too.
        experts = sum(isinstance(module, RoutedExperts) for module in model.modules())
        routers = experts if family in ("qwen3_moe", "qwen2_moe") else 0
        assert len(shapes) == rows.count(1) + routers > 4


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.usefixtures("without_kernels")
@torch.no_grad()
def test_without_kernels_of_torchs_the_engine_multiplies_every_dense_layer_of_every_pass(family, dtype, monkeypatch):
    with (
        saved_family(family, dtype) as (_, folder),
        offloaded(folder, device="cpu") as model,
        packing_runner(model) as runner,
        rows_of_dense_layers(model) as rows,
    ):
        routers = sum(isinstance(module, RoutedExperts) for module in model.modules())
        for by_chunks in (False, True):
            rows.clear()
            with counted(monkeypatch) as shapes:
                if by_chunks:
                    runner.run([SequenceChunk([5, 6, 7], 0, (0,)), SequenceChunk([9, 4], 0, (1,))])
                else:
                    model(input_ids=random_ids(2, 7))
            # Softmax routers are no plain dense layers, and the engine's only where choices are made by rows.
            more = routers if by_chunks and dtype == BF16 and family in ("qwen3_moe", "qwen2_moe") else 0
            assert len(shapes) == len(rows) + more > 4
        with counted(monkeypatch) as shapes, torch.enable_grad():
            model(input_ids=random_ids(2, 7))
        assert shapes == []


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("dtype", HALVES)
@torch.no_grad()
def test_a_prompts_logits_are_as_near_to_float32_as_torchs(family, dtype):
    with saved_family(family, dtype) as (stock, folder), offloaded(folder, device="cpu") as model:
        exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = random_ids(2, 45)
        expected = exact(input_ids=ids).logits.double()
        # The median: where a router is all but undecided, either may choose another expert than float32 does.
        errors = [(of(input_ids=ids).logits.double() - expected).norm(dim=-1).median() for of in (stock, model)]
        assert errors[1] <= 1.1 * errors[0]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@torch.no_grad()
def test_logits_are_as_near_to_float32_as_torchs(family, monkeypatch):
    with saved_family(family, BF16) as (stock, folder):
        exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = random_ids(1, 24)
        expected = exact(input_ids=ids).logits[0, 8:].double()
        errors = {}
        with offloaded(folder, device="cpu") as model:
            for name, of in (("torch", stock), ("engine", model)):
                cache = DynamicCache(config=of.config)
                of(input_ids=ids[:, :8], past_key_values=cache)
                with counted(monkeypatch) as shapes:
                    rows = [of(input_ids=ids[:, i : i + 1], past_key_values=cache).logits[0, -1] for i in range(8, 24)]
                assert bool(shapes) == (name == "engine")
                errors[name] = float((torch.stack(rows).double() - expected).norm() / expected.norm())
        assert errors["engine"] <= 1.2 * errors["torch"]


@contextmanager
def packing_runner(model: PreTrainedModel) -> Iterator[BatchRunner]:
    runner = make_runner(model, max_tokens=32, max_context=32, num_blocks=8, block_size=16, max_sequences=4)
    try:
        yield runner
    finally:
        runner.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.usefixtures("with_kernels")
def test_of_packed_sequences_the_engine_takes_the_head_alone(family, monkeypatch):
    with (
        saved_family(family, BF16) as (_, folder),
        offloaded(folder, device="cpu") as model,
        packing_runner(model) as runner,
        counted(monkeypatch) as shapes,
        calls(monkeypatch) as count,
    ):
        runner.run([SequenceChunk([5, 6, 7], 0, (0,)), SequenceChunk([9, 4], 0, (1,))])
        runner.run([SequenceChunk([8], 3, (0,)), SequenceChunk([3, 2, 1], 0, (2,)), SequenceChunk([7], 2, (1,))])
        runner.run([SequenceChunk([6], 4, (0,))])
    assert [shape[:-1].numel() for shape in shapes] == [2, 3, 1]
    assert count["norm"] > 4
    assert count["attend"] == 0


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen2_moe", "gemma4", "deepseek_v3"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.usefixtures("has_kernels")
def test_a_packed_token_is_the_same_to_the_bit_however_it_is_served(family, dtype):
    """Alone, beside other single tokens, beside a prompt; and at the end of its own prompt, in one pass with it."""
    prompt, other = [5, 6, 7, 11, 2], [9, 4, 1]
    with (
        saved_family(family, dtype) as (_, folder),
        offloaded(folder, device="cpu") as model,
        packing_runner(model) as runner,
    ):
        whole = runner.run([SequenceChunk([*prompt, 8], 0, (3,))])[0].clone()
        runner.run([SequenceChunk(prompt, 0, (0,))])
        runner.run([SequenceChunk(other, 0, (1,))])
        token, single = SequenceChunk([8], 5, (0,)), SequenceChunk([3], 3, (1,))
        longer = SequenceChunk([2, 4, 6, 8, 10, 12], 0, (2,))
        alone = runner.run([token])[0].clone()
        beside = [
            runner.run([single, token])[1].clone(),
            runner.run([token, longer])[0].clone(),
            runner.run([longer, single, token])[2].clone(),
        ]
    assert all(torch.equal(logits, alone) for logits in beside)
    assert torch.equal(whole, alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.usefixtures("with_kernels")
@torch.no_grad()
def test_products_in_other_dtypes_stay_with_torch_where_it_has_kernels(dtype, monkeypatch):
    with (
        saved_family("qwen3_moe", dtype) as (_, folder),
        offloaded(folder, device="cpu") as model,
        packing_runner(model) as runner,
        counted(monkeypatch) as shapes,
    ):
        model(input_ids=random_ids(1, 1))
        runner.run([SequenceChunk([5, 6, 7], 0, (0,)), SequenceChunk([9, 4], 0, (1,))])
    assert shapes == []


def test_torch_has_kernels_where_the_processor_has_avx512():
    flags = set(Path("/proc/cpuinfo").read_text().split())
    assert torch_multiplies(torch.float32)
    if {"avx512bw", "avx512dq", "avx512vl"} <= flags:
        assert torch_multiplies(BF16)
    elif not flags & {"avx512f", "avx_ne_convert"}:
        assert not torch_multiplies(BF16)
        assert not torch_multiplies(torch.float16)


@pytest.mark.usefixtures("without_kernels")
@torch.no_grad()
def test_portable_kernels_do_not_take_products_from_torch(monkeypatch):
    with (
        saved_family("qwen3_moe", BF16) as (_, folder),
        offloaded(folder, device="cpu", isa="portable") as model,
        counted(monkeypatch) as shapes,
    ):
        model(input_ids=random_ids(1, 5))
    assert shapes == []


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@torch.no_grad()
def test_what_lies_between_products(dtype, monkeypatch):
    """In a pass with one token of one sequence, and in no other."""
    with saved_family("qwen3_moe", dtype) as (_, folder), offloaded(folder, device="cpu") as model:
        layers, cache = model.config.num_hidden_layers, DynamicCache(config=model.config)
        with calls(monkeypatch) as count:
            model(input_ids=random_ids(1, 7), past_key_values=cache)
            model(input_ids=random_ids(2, 1))
            with torch.enable_grad():
                model(input_ids=random_ids(1, 1))
        assert count == {}
        with calls(monkeypatch) as count:
            model(input_ids=random_ids(1, 1), past_key_values=cache)
        assert count == {"norm": 4 * layers + 1, "turn": 2 * layers, "choose": layers, "attend": layers}
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_in_float32_are_stocks(family):
    """Token by token behind a prompt; what an architecture does otherwise stays its own."""
    with saved_family(family) as (stock, folder), offloaded(folder, device="cpu") as model:
        ids, rows = random_ids(1, 40), []
        for of in (stock, model):
            cache = DynamicCache(config=of.config)
            of(input_ids=ids[:, :9], past_key_values=cache)
            rows.append([of(input_ids=ids[:, i : i + 1], past_key_values=cache).logits[0, -1] for i in range(9, 40)])
    torch.testing.assert_close(torch.stack(rows[1]), torch.stack(rows[0]), rtol=1e-3, atol=5e-5)


@torch.no_grad()
def test_a_mask_is_for_torch(monkeypatch):
    """Padding in front of a prompt."""
    with saved_family("qwen3_moe") as (stock, folder), offloaded(folder, device="cpu") as model:
        ids, mask, results = random_ids(1, 12), torch.tensor([[0] * 3 + [1] * 9]), []
        with calls(monkeypatch) as count:
            for of in (stock, model):
                cache = DynamicCache(config=of.config)
                of(input_ids=ids[:, :11], attention_mask=mask[:, :11], past_key_values=cache)
                results.append(of(input_ids=ids[:, 11:], attention_mask=mask, past_key_values=cache).logits)
        assert count["norm"] > 0
        assert count["attend"] == 0
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_torch_has_its_threads_back():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with saved_family("qwen3_moe") as (_, folder), offloaded(folder, device="cpu") as model:
            seen = []
            hook = model.lm_head.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
            model(input_ids=random_ids(1, 1))
            model(input_ids=random_ids(1, 2))
            hook.remove()
            assert seen == [1, 2]
            with pytest.raises(IndexError):
                model(input_ids=torch.full((1, 1), 10**6))
            assert torch.get_num_threads() == 2
            assert model(input_ids=random_ids(1, 1)).logits.isfinite().all()
    finally:
        torch.set_num_threads(before)


def test_torch_works_on_one_thread_where_little_is_left_to_it(has_kernels):
    """Packed passes of few tokens and keys."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with saved_family("qwen3_moe", BF16) as (_, folder), offloaded(folder, device="cpu") as model:
            seen = []
            model.lm_head.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
            runner = make_runner(model, max_tokens=2100, max_context=2100, num_blocks=140, block_size=16)
            blocks = tuple(range(132))
            seen.clear()  # of what found out how the model caches
            runner.run([SequenceChunk([5] * 32, 0, blocks)])
            runner.run([SequenceChunk([5] * 33, 0, blocks)])
            runner.run([SequenceChunk([5] * 2047, 0, blocks)])
            runner.run([SequenceChunk([6], 2047, blocks)])
            runner.run([SequenceChunk([7], 2048, blocks)])
            runner.close()
        assert seen == ([2] * 5 if has_kernels else [1, 2, 2, 1, 2])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("with_kernels")
@torch.no_grad()
def test_a_pass_that_was_interrupted_leaves_nothing_behind(monkeypatch):
    with saved_family("qwen3_moe", BF16) as (_, folder), offloaded(folder, device="cpu") as model:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        hook = model.lm_head.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=random_ids(1, 1))
        hook.remove()
        with counted(monkeypatch) as shapes:
            model(input_ids=random_ids(1, 5))
        assert shapes == []


@torch.no_grad()
def test_a_closed_engine_says_so():
    with saved_family("qwen3_moe", BF16) as (_, folder), offloaded(folder, device="cpu") as model:
        engine = offload_of(model).engine
        model(input_ids=random_ids(1, 1))
        engine.close()
        with pytest.raises(EngineError, match="closed"):
            model(input_ids=random_ids(1, 1))
