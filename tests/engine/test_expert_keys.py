"""Placing expert tensors by name: every layout, and a sentence for everything that does not fit."""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from greenroom.engine.checkpoint import TensorEntry
from greenroom.engine.expert_keys import (
    ExpertPiece,
    Part,
    expert_key_patterns,
    is_expert_key,
    place_experts,
)
from greenroom.engine.spec import ExpertLayerSpec, ModelSpec
from greenroom.errors import CheckpointError, UnsupportedModelError
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat

EXPERTS = 3
LAYERS = (1, 4)


def make_spec(
    name: str = "model.layers.{}.mlp.experts",
    layers: Iterable[int] = LAYERS,
    gated: bool = True,
    bias: bool = False,
    **layout: bool,
) -> ModelSpec:
    fmt = ExpertFormat(6, 4, torch.bfloat16, Activation(ActivationKind.SILU), gated=gated, bias=bias)
    return ModelSpec(
        tuple(ExpertLayerSpec(name.format(n), n, EXPERTS, fmt, **layout) for n in layers), 0, torch.bfloat16
    )


def make_entries(
    names: Iterable[str], dtype: torch.dtype | str = torch.bfloat16, file: str = "a.safetensors"
) -> dict[str, TensorEntry]:
    return {name: TensorEntry(name, Path(file), dtype, (), 0, 0) for name in names}


def per_expert(stem: str, ends: Iterable[str], layers: Iterable[int] = LAYERS) -> list[str]:
    return [f"{stem.format(n)}.{e}.{end}" for n in layers for e in range(EXPERTS) for end in ends]


def fused(stem: str, ends: Iterable[str], layers: Iterable[int] = LAYERS) -> list[str]:
    return [f"{stem.format(n)}.{end}" for n in layers for end in ends]


GATED = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
MIXTRAL = ("w1.weight", "w3.weight", "w2.weight")
GATED_PARTS = (Part.GATE, Part.UP, Part.DOWN)
HF = "model.layers.{}.mlp.experts"

PER_EXPERT = {
    "qwen": (make_spec(), HF, GATED, GATED_PARTS),
    "mixtral": (make_spec(), "model.layers.{}.block_sparse_moe.experts", MIXTRAL, GATED_PARTS),
    "no prefix": (make_spec(), "layers.{}.mlp.experts", GATED, GATED_PARTS),
    "jamba": (make_spec(), "model.layers.{}.feed_forward.experts", GATED, GATED_PARTS),
    "nemotron": (
        make_spec("model.layers.{}.mixer.experts", gated=False),
        "backbone.layers.{}.mixer.experts",
        ("up_proj.weight", "down_proj.weight"),
        (Part.UP, Part.DOWN),
    ),
    "biased": (
        make_spec(bias=True),
        HF,
        (*GATED, "gate_proj.bias", "up_proj.bias", "down_proj.bias"),
        (*GATED_PARTS, Part.GATE_BIAS, Part.UP_BIAS, Part.DOWN_BIAS),
    ),
    # A module that interleaves says nothing about tensors that hold one projection each.
    "plain for gpt-oss": (make_spec(transposed=True, interleaved=True), HF, GATED, GATED_PARTS),
}


@pytest.mark.parametrize(("spec", "stem", "ends", "parts"), PER_EXPERT.values(), ids=PER_EXPERT.keys())
def test_a_tensor_for_every_projection(spec, stem, ends, parts):
    placed = place_experts(make_entries(per_expert(stem, ends)), spec)
    for index, number in enumerate(LAYERS):
        assert set(placed.layers[index]) == {
            ExpertPiece(f"{stem.format(number)}.{e}.{end}", index, e, part)
            for e in range(EXPERTS)
            for end, part in zip(ends, parts, strict=True)
        }
    assert len(list(placed)) == len(LAYERS) * EXPERTS * len(ends)


OSS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
FUSED = {
    "qwen": (
        make_spec(),
        HF,
        {"gate_up_proj": (Part.GATE_UP, False, False), "down_proj": (Part.DOWN, False, False)},
    ),
    "nemotron": (
        make_spec("model.layers.{}.mixer.experts", gated=False),
        "model.layers.{}.mixer.experts",
        {"up_proj": (Part.UP, False, False), "down_proj": (Part.DOWN, False, False)},
    ),
    "gpt-oss": (
        make_spec(bias=True, transposed=True, interleaved=True),
        HF,
        {
            "gate_up_proj": (Part.GATE_UP, True, True),
            "down_proj": (Part.DOWN, True, False),
            "gate_up_proj_bias": (Part.GATE_UP_BIAS, False, True),
            "down_proj_bias": (Part.DOWN_BIAS, False, False),
        },
    ),
    "granite": (
        make_spec("model.layers.{}.block_sparse_moe.experts"),
        "model.layers.{}.block_sparse_moe",
        {
            "input_linear.weight": (Part.GATE_UP, False, False),
            "output_linear.weight": (Part.DOWN, False, False),
        },
    ),
    "gemma4 text from multimodal": (
        make_spec("model.layers.{}.experts"),
        "model.language_model.layers.{}.experts",
        {"gate_up_proj": (Part.GATE_UP, False, False), "down_proj": (Part.DOWN, False, False)},
    ),
}


@pytest.mark.parametrize(("spec", "stem", "ends"), FUSED.values(), ids=FUSED.keys())
def test_one_tensor_for_all_experts(spec, stem, ends):
    placed = place_experts(make_entries(fused(stem, ends)), spec)
    for index, number in enumerate(LAYERS):
        assert set(placed.layers[index]) == {
            ExpertPiece(f"{stem.format(number)}.{end}", index, None, part, transposed, interleaved)
            for end, (part, transposed, interleaved) in ends.items()
        }


BYSTANDERS = (
    "model.layers.1.mlp.shared_expert.gate_proj.weight",
    "model.layers.1.mlp.shared_experts.down_proj.weight",
    "model.layers.1.mlp.shared_expert_gate.weight",
    "model.layers.1.mlp.gate.weight",
    "model.layers.1.mlp.gate.e_score_correction_bias",
    "model.layers.1.mlp.experts.e_score_correction_bias",
    "model.layers.1.block_sparse_moe.gate.weight",
    "model.layers.1.block_sparse_moe.router.layer.weight",
    "model.layers.1.shared_mlp.input_linear.weight",
    "model.layers.1.router.per_expert_scale",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.1.mlp.moe_statics.e_score_correction_bias",
    "model.embed_tokens.weight",
    # A draft layer beyond the model's own, and draft layers that number from 0 again.
    "model.layers.61.mlp.experts.0.gate_proj.weight",
    "mtp.layers.1.mlp.experts.0.gate_proj.weight",
    "model.mtp.layers.1.mlp.experts.gate_up_proj",
)


def test_bystanders_are_left_alone():
    spec = make_spec()
    names = per_expert(HF, GATED)
    placed = place_experts(make_entries([*BYSTANDERS, *names]), spec)
    assert {piece.name for piece in placed} == set(names)
    assert not [name for name in BYSTANDERS if is_expert_key(name, spec)]
    assert not [name for name in BYSTANDERS for p in expert_key_patterns(spec) if re.search(p, name)]
    assert all(is_expert_key(name, spec) for name in names)


def test_draft_layers_beside_another_prefix():
    spec = make_spec("model.layers.{}.mixer.experts", gated=False)
    names = per_expert("backbone.layers.{}.mixer.experts", ("up_proj.weight", "down_proj.weight"))
    drafts = ["mtp.layers.1.mixer.experts.0.up_proj.weight", "draft.layers.1.mixer.experts.0.up_proj.weight"]
    placed = place_experts(make_entries(names + drafts), spec, ignore=[r"^draft\."])
    assert {piece.name for piece in placed} == set(names)
    with pytest.raises(
        CheckpointError, match=r"experts in backbone\.layers and draft\.layers, but none in model\.layers"
    ):
        place_experts(make_entries(names + drafts), spec)


def test_a_layer_that_the_model_has_is_never_ignored():
    """glm4_moe ignores layer 46, one size's draft layer and the other's ordinary one."""
    spec = make_spec(layers=(45, 46))
    names = per_expert(HF, GATED, (45, 46))
    placed = place_experts(make_entries(names), spec, ignore=[r"model\.layers\.46.*"])
    assert {piece.name for piece in placed} == set(names)


def test_patterns_cover_all_layouts_and_parameters():
    for spec, stem, ends, _ in PER_EXPERT.values():
        assert all(is_expert_key(name, spec) for name in per_expert(stem, ends))
    for spec, stem, ends in FUSED.values():
        assert all(is_expert_key(name, spec) for name in fused(stem, ends))
        assert all(is_expert_key(f"{layer.name}.gate_up_proj", spec) for layer in spec.layers)
    assert not is_expert_key("model.layers.14.mlp.experts.0.w1.weight", make_spec())


@pytest.mark.parametrize("drop", range(len(LAYERS) * EXPERTS * 3))
@pytest.mark.parametrize(("stem", "ends"), [(HF, GATED), ("model.layers.{}.block_sparse_moe.experts", MIXTRAL)])
def test_any_missing_projection_is_named(stem, ends, drop):
    names = per_expert(stem, ends)
    gone = names.pop(drop)
    expert = gone.rsplit(".", 2)[0]
    with pytest.raises(
        CheckpointError,
        match=rf"^tensor '{re.escape(gone)}' is missing.* sibling '{re.escape(expert)}.* is in a\.safe",
    ):
        place_experts(make_entries(names), make_spec())


@pytest.mark.parametrize(("spec", "stem", "ends"), FUSED.values(), ids=FUSED.keys())
def test_any_missing_fused_tensor_is_named(spec, stem, ends):
    names = fused(stem, ends)
    for gone in names:
        with pytest.raises(CheckpointError, match=rf"^tensor '{re.escape(gone)}' is missing .*a\.safetensors"):
            place_experts(make_entries(set(names) - {gone}), spec)


def test_a_whole_expert_or_layer_is_missing():
    names = per_expert(HF, GATED)
    rest = [name for name in names if ".4.mlp.experts.2." not in name]
    with pytest.raises(CheckpointError, match=r"'model\.layers\.4\.mlp\.experts\.2\.gate_proj\.weight' is missing"):
        place_experts(make_entries(rest), make_spec())
    rest = [name for name in names if ".layers.4." not in name]
    with pytest.raises(CheckpointError, match=r"no routed experts for layer 4 \('model\.layers\.4\.mlp\.experts'\)"):
        place_experts(make_entries(rest), make_spec())
    with pytest.raises(CheckpointError, match="no routed experts for layer 1"):
        place_experts({}, make_spec())


def test_the_same_weights_twice():
    names = per_expert(HF, GATED)
    for double in ("model.layers.1.mlp.experts.0.w1.weight", "model.layers.1.mlp.experts.gate_up_proj"):
        with pytest.raises(CheckpointError, match=rf"{double}' both hold the gate of expert 0"):
            place_experts(make_entries([*names, double]), make_spec())


def test_more_than_the_model_has():
    names = per_expert(HF, GATED)
    for extra in ("3.gate_proj.weight", "0.gate_proj.bias", "down_proj_bias"):
        with pytest.raises(CheckpointError, match=rf"a\.safetensors: tensor '.*{extra}' has no place .* 3 experts"):
            place_experts(make_entries([*names, f"model.layers.1.mlp.experts.{extra}"]), make_spec())
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj' has no place"):
        place_experts(make_entries(fused(HF, ("gate_up_proj", "down_proj"))), make_spec(gated=False))


def test_unknown_tensors_are_refused():
    for strange in ("0.gate_proj.lora_A", "0.up_proj.gain", "gate_proj", "router_scale"):
        with pytest.raises(UnsupportedModelError, match=rf"does not know what tensor '.*{strange}' means"):
            place_experts(make_entries([*per_expert(HF, GATED), f"model.layers.1.mlp.experts.{strange}"]), make_spec())


QUANTISED = {
    "deepseek": (["0.gate_proj.weight", "0.gate_proj.weight_scale_inv"], "FP8 in blocks"),
    "fused fp8": (["gate_up_proj", "gate_up_proj_scale_inv"], "FP8 in blocks"),
    "gptq": (
        ["0.gate_proj.g_idx", "0.gate_proj.qweight", "0.gate_proj.qzeros", "0.gate_proj.scales"],
        "GPTQ or AWQ INT4",
    ),
    "awq": (["0.w1.qweight"], "GPTQ or AWQ INT4"),
    "compressed": (["0.gate_proj.weight_packed", "0.gate_proj.weight_scale"], "compressed-tensors"),
    "gpt-oss": (["down_proj_bias", "gate_up_proj_blocks", "gate_up_proj_scales"], "MXFP4"),
    "nvfp4": (["0.gate_proj.weight_scale", "0.gate_proj.weight_scale_2", "0.gate_proj.input_scale"], "NVFP4"),
    "bnb": (["0.gate_proj.weight", "0.gate_proj.weight.absmax"], "bitsandbytes"),
}


@pytest.mark.parametrize(("ends", "kind"), QUANTISED.values(), ids=QUANTISED.keys())
def test_quantised_experts_are_named(ends, kind):
    names = fused(HF, ends, (1,))
    with pytest.raises(
        UnsupportedModelError,
        match=rf"quantised as {kind} \(tensor 'model\.layers\.1.*'\); greenroom supports BF16, FP16 and FP32",
    ):
        place_experts(make_entries(names), make_spec())
    assert all(is_expert_key(name, make_spec()) for name in names)


@pytest.mark.parametrize(
    ("dtype", "shown"), [(torch.float8_e4m3fn, "float8_e4m3fn"), ("F4", "F4"), (torch.int8, "int8")]
)
def test_dtypes_that_are_not_supported(dtype, shown):
    with pytest.raises(UnsupportedModelError, match=rf"experts have dtype {shown} \(tensor 'model\.layers\.1"):
        place_experts(make_entries(per_expert(HF, GATED), dtype), make_spec())


def test_quantisation_elsewhere_does_not_matter():
    names = make_entries(per_expert(HF, GATED))
    names |= make_entries(["model.layers.1.self_attn.q_proj.weight_scale_inv"], torch.float32)
    names |= make_entries(["mtp.layers.1.mlp.experts.0.gate_proj.weight"], torch.float8_e4m3fn)
    assert len(list(place_experts(names, make_spec()))) == len(LAYERS) * EXPERTS * 3


def test_two_sets_of_experts_in_one_layer():
    spec = make_spec()
    double = dataclasses.replace(spec, layers=(spec.layers[0], spec.layers[0]))
    with pytest.raises(UnsupportedModelError, match="two sets of routed experts in one layer"):
        place_experts({}, double)


def test_a_model_with_two_stacks():
    spec = make_spec("thinker.model.layers.{}.mlp.experts")
    both = dataclasses.replace(spec, layers=spec.layers + make_spec("talker.model.layers.{}.mlp.experts").layers)
    names = per_expert("talker.model.layers.{}.mlp.experts", GATED)
    names += per_expert("thinker.model.layers.{}.mlp.experts", GATED)
    placed = place_experts(make_entries(names), both)
    assert all(piece.name.startswith("thinker") for pieces in placed.layers[:2] for piece in pieces)
    assert all(piece.name.startswith("talker") for pieces in placed.layers[2:] for piece in pieces)
    alone = place_experts(make_entries(names), spec)
    assert all(piece.name.startswith("thinker") for piece in alone)
