"""Reading experts into the store: what stock transformers would load, or an error."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from greenroom.engine.checkpoint import Checkpoint
from greenroom.engine.expert_keys import is_expert_key, place_experts
from greenroom.engine.expert_reader import plan_reads
from greenroom.engine.inspect import inspect_model
from greenroom.engine.spec import ExpertLayerSpec
from greenroom.errors import CheckpointError
from tests.engine.expert_reading import (
    STEM,
    E,
    H,
    I,
    assert_same_bits,
    loaded,
    make_spec,
    per_expert_tensors,
)
from tests.reference.families import FAMILIES, make_model


def expected_parts(module: torch.nn.Module, layer: ExpertLayerSpec) -> dict[str, torch.Tensor]:
    """What the store must hold, from the parameters of a module that stock transformers loaded."""

    def rows(name: str) -> torch.Tensor:
        weight = getattr(module, name).detach()
        return weight.transpose(1, 2) if layer.transposed else weight

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat((tensor[:, 0::2], tensor[:, 1::2]), 1) if layer.interleaved else tensor

    parts = {"up": apart(rows("gate_up_proj")) if layer.format.gated else rows("up_proj"), "down": rows("down_proj")}
    if layer.format.bias:
        parts["up_bias"] = apart(module.gate_up_proj_bias.detach())
        parts["down_bias"] = module.down_proj_bias.detach()
    return parts


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("original", [True, False], ids=["hub", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_load_what_transformers_loads(family, original, saved, tmp_path):
    # One file in one precision, many small shards in the other.
    size = "5GB" if saved == torch.bfloat16 else "60KB"
    make_model(family, saved, seed=3).save_pretrained(tmp_path, save_original_format=original, max_shard_size=size)
    assert (tmp_path / "model.safetensors").exists() == (size == "5GB")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    spec = inspect_model(stock)
    with loaded(tmp_path, spec) as store:
        for index, layer in enumerate(spec.layers):
            views = store.views(index)
            for part, expected in expected_parts(stock.get_submodule(layer.name), layer).items():
                assert_same_bits(getattr(views, part), expected)


@pytest.mark.parametrize("original", [True, False], ids=["hub", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_leave_the_rest_of_the_checkpoint(family, original, tmp_path):
    """Expert keys, and nothing else, are what the model's other loading must not look for."""
    model = make_model(family)
    model.save_pretrained(tmp_path, save_original_format=original)
    spec = inspect_model(model)
    parameters = {name: p.numel() for name, p in model.named_parameters()}
    inside = {name for name in parameters if name.startswith(tuple(f"{layer.name}." for layer in spec.layers))}
    assert inside == {name for name in parameters if is_expert_key(name, spec)}
    with Checkpoint.open(tmp_path) as checkpoint:
        placed = {piece.name for piece in place_experts(checkpoint.tensors, spec)}
        assert placed == {name for name in checkpoint.tensors if is_expert_key(name, spec)}
        stored = sum(checkpoint.tensors[name].nbytes for name in placed)
        assert stored == 4 * sum(parameters[name] for name in inside)


WRONG = {
    "gate rows": ("1.gate_proj.weight", (I + 1, H), f"[{I}, {H}]"),
    "transposed down": ("0.down_proj.weight", (I, H), f"[{H}, {I}]"),
    "flat": ("2.up_proj.weight", (I * H,), f"[{I}, {H}]"),
}


@pytest.mark.parametrize(("end", "shape", "asked"), WRONG.values(), ids=WRONG.keys())
def test_wrong_shapes_are_found_before_anything_is_read(end, shape, asked, tmp_path, monkeypatch):
    tensors = per_expert_tensors(torch.bfloat16)
    name = f"{STEM.format(1)}.{end}"
    tensors[name] = torch.zeros(shape, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(Checkpoint, "read_into", lambda *_: pytest.fail("read before the shapes were checked"))
    with pytest.raises(CheckpointError) as caught, loaded(tmp_path, make_spec()):
        pass
    assert str(caught.value) == (
        f"{tmp_path / 'model.safetensors'}: tensor '{name}' has shape {list(shape)}, "
        f"but the model's configuration asks for {asked}"
    )


@pytest.mark.parametrize("layout", [{}, {"transposed": True, "interleaved": True}])
def test_a_fused_tensor_for_fewer_experts(layout, tmp_path):
    shape = (E - 1, H, 2 * I) if layout else (E - 1, 2 * I, H)
    tensors = {
        f"{STEM.format(0)}.gate_up_proj": torch.zeros(shape),
        f"{STEM.format(0)}.down_proj": torch.zeros(E, I, H) if layout else torch.zeros(E, H, I),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with (
        pytest.raises(CheckpointError, match=rf"gate_up_proj' has shape \[{E - 1}, .*asks for \[{E}, "),
        loaded(tmp_path, make_spec(layers=1, **layout)),
    ):
        pass


def test_reads_follow_the_files(tmp_path):
    make_model("qwen3_moe").save_pretrained(tmp_path, max_shard_size="60KB")
    spec = inspect_model(make_model("qwen3_moe"))
    with Checkpoint.open(tmp_path) as checkpoint:
        reads = plan_reads(checkpoint, place_experts(checkpoint.tensors, spec), spec)
    places = [(read.entry.file, read.entry.offset + read.skip) for read in reads]
    assert places == sorted(places)
    assert len({file for file, _ in places}) > 3


def test_specs_are_followed_not_file_order(tmp_path):
    """Layers of the spec in another order than in the file still get their own weights."""
    tensors = per_expert_tensors(torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    spec = make_spec()
    swapped = dataclasses.replace(spec, layers=spec.layers[::-1])
    with loaded(tmp_path, swapped) as store:
        assert_same_bits(store.views(0).down[2], tensors[f"{STEM.format(1)}.2.down_proj.weight"])
        assert_same_bits(store.views(1).down[2], tensors[f"{STEM.format(0)}.2.down_proj.weight"])
