"""Experts keep their bits on the way into the store, whatever their layout; or are converted as torch does."""

import pytest
import torch
from safetensors.torch import save_file

from greenroom.engine import expert_reader
from greenroom.engine.spec import ExpertLayerSpec, ModelSpec
from greenroom.experts.formats import ExpertFormat
from tests.engine.expert_reading import (
    DTYPES,
    SILU,
    STEM,
    E,
    H,
    I,
    assert_same_bits,
    bits,
    loaded,
    make_spec,
    per_expert_tensors,
    random_bits,
)


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_conversion(source, target, tmp_path, monkeypatch):
    monkeypatch.setattr(expert_reader, "_BLOCK_ROWS", 2)
    monkeypatch.setattr(expert_reader, "SCRATCH_BYTES", 1)
    tensors = per_expert_tensors(source)
    save_file(tensors, tmp_path / "model.safetensors")
    with loaded(tmp_path, make_spec(target)) as store:
        for n in range(2):
            for e in range(E):
                gate, up, down = (
                    tensors[f"{STEM.format(n)}.{e}.{name}.weight"].to(target)
                    for name in ("gate_proj", "up_proj", "down_proj")
                )
                assert_same_bits(store.views(n).up[e], torch.cat((gate, up)))
                assert_same_bits(store.views(n).down[e], down)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scratch", [1, 100_000, 4 << 20])
def test_every_bit_survives_transposing_and_interleaving(dtype, bias, scratch, tmp_path, monkeypatch):
    # Several chunks (of 64 rows at least) and tiles, none of which divides the widths.
    hidden, inter = 330, 530
    monkeypatch.setattr(expert_reader, "SCRATCH_BYTES", scratch)
    tensors = {}
    for n in range(2):
        tensors[f"{STEM.format(n)}.gate_up_proj"] = random_bits(E, hidden, 2 * inter, dtype=dtype)
        tensors[f"{STEM.format(n)}.down_proj"] = random_bits(E, inter, hidden, dtype=dtype)
        if bias:
            tensors[f"{STEM.format(n)}.gate_up_proj_bias"] = random_bits(E, 2 * inter, dtype=dtype)
            tensors[f"{STEM.format(n)}.down_proj_bias"] = random_bits(E, hidden, dtype=dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    fmt = ExpertFormat(hidden, inter, dtype, SILU, bias=bias)
    layers = tuple(ExpertLayerSpec(STEM.format(n), n, E, fmt, True, True) for n in range(2))
    with loaded(tmp_path, ModelSpec(layers, 0, dtype)) as store:
        for n in range(2):
            stored, views = tensors[f"{STEM.format(n)}.gate_up_proj"], store.views(n)
            for column in range(inter):
                assert torch.equal(bits(views.up[:, column]), bits(stored[:, :, 2 * column]))
                assert torch.equal(bits(views.up[:, inter + column]), bits(stored[:, :, 2 * column + 1]))
            assert_same_bits(views.down, tensors[f"{STEM.format(n)}.down_proj"].transpose(1, 2))
            if bias:
                stored = tensors[f"{STEM.format(n)}.gate_up_proj_bias"]
                assert_same_bits(views.up_bias[:, :inter], stored[:, 0::2])
                assert_same_bits(views.up_bias[:, inter:], stored[:, 1::2])
                assert_same_bits(views.down_bias, tensors[f"{STEM.format(n)}.down_proj_bias"])


@pytest.mark.parametrize("gated", [False, True])
def test_biases_of_single_experts(gated, tmp_path):
    names = ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj")
    tensors = {}
    for e in range(E):
        for name in names:
            rows, columns = (H, I) if name == "down_proj" else (I, H)
            tensors[f"{STEM.format(0)}.{e}.{name}.weight"] = random_bits(rows, columns, dtype=torch.bfloat16)
            tensors[f"{STEM.format(0)}.{e}.{name}.bias"] = random_bits(rows, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    with loaded(tmp_path, make_spec(layers=1, gated=gated, bias=True)) as store:
        views = store.views(0)
        for e in range(E):
            for kind, up, down in (("weight", views.up, views.down), ("bias", views.up_bias, views.down_bias)):
                ups = [tensors[f"{STEM.format(0)}.{e}.{name}.{kind}"] for name in names[:-1]]
                assert_same_bits(up[e], torch.cat(ups))
                assert_same_bits(down[e], tensors[f"{STEM.format(0)}.{e}.down_proj.{kind}"])


def test_padding_between_parts_is_untouched(tmp_path):
    save_file(per_expert_tensors(torch.bfloat16), tmp_path / "model.safetensors")
    spec = make_spec()
    fmt = spec.layers[0].format
    with loaded(tmp_path, spec) as store:
        blocks = store.blocks(0)
        used = ((fmt.offsets[0], 2 * I * H * 2), (fmt.offsets[1], I * H * 2))
        padding = torch.ones(fmt.block_bytes, dtype=torch.bool)
        for start, size in used:
            padding[start : start + size] = False
        assert padding.any()
        assert torch.all(blocks[:, padding] == 0xA5)
