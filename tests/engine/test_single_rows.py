"""Decode of one sequence on a CPU: whose rows the CPU engine multiplies, and how well."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from greenroom.engine import single_rows
from greenroom.engine.batch import SequenceChunk
from greenroom.engine.offload import offload_of
from greenroom.engine.runners import make_runner
from greenroom.errors import EngineError
from greenroom.experts.cpu import CpuExperts
from tests.engine.offloaded import offloaded, random_ids, saved_family

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def small_weights_count(monkeypatch):
    monkeypatch.setattr(single_rows, "LEAST_BYTES", 1)


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
        # A family that caches latents multiplies all of them.
        assert len(shapes) == rows.count(1) > 4


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


def test_a_runner_of_packed_sequences_leaves_rows_to_torch(monkeypatch):
    """Also a single one: its text must not depend on whether others are there."""
    with saved_family("qwen3_moe", BF16) as (_, folder), offloaded(folder, device="cpu") as model:
        runner = make_runner(model, max_tokens=32, max_context=32, num_blocks=4, block_size=16, max_sequences=2)
        try:
            with counted(monkeypatch) as shapes:
                runner.run([SequenceChunk([5, 6, 7], 0, (0, 1))])
                runner.run([SequenceChunk([8], 3, (0, 1))])
            assert shapes == []
        finally:
            runner.close()


@torch.no_grad()
def test_float32_stays_with_torch(monkeypatch):
    with (
        saved_family("qwen3_moe") as (_, folder),
        offloaded(folder, device="cpu") as model,
        counted(monkeypatch) as shapes,
    ):
        model(input_ids=random_ids(1, 1))
    assert shapes == []


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
