"""Checkpoints cut short or damaged: an error, never other weights."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from greenroom.engine.checkpoint import Checkpoint
from greenroom.engine.expert_keys import place_experts
from greenroom.engine.expert_reader import read_experts
from greenroom.errors import CheckpointError, GreenroomError
from greenroom.experts.store import HostStore
from tests.engine.expert_reading import E, loaded, make_spec, per_expert_tensors


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[Path, bytes, torch.Tensor]:
    folder = tmp_path_factory.mktemp("small")
    save_file(per_expert_tensors(torch.bfloat16), folder / "model.safetensors")
    with loaded(folder, make_spec()) as store:
        whole = torch.cat([store.blocks(layer).clone() for layer in range(2)])
    return folder, (folder / "model.safetensors").read_bytes(), whole


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_truncation_gives_a_silent_result(small, data):
    """Cut before opening, or while it is read: an error that names the file."""
    folder, whole, _ = small
    file = folder / "model.safetensors"
    cut = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        file.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            Checkpoint.open(folder)
        return
    file.write_bytes(whole)
    spec = make_spec()
    with (
        Checkpoint.open(folder) as checkpoint,
        HostStore([layer.format for layer in spec.layers], [E, E]) as store,
    ):
        file.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated.*tensor 'model\.layers"):
            read_experts(checkpoint, place_experts(checkpoint.tensors, spec), spec, store)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_header_never_gives_other_weights_silently(small, data):
    """One wrong byte in the header, names included: an error of ours, or exactly the right experts."""
    folder, whole, expected = small
    end = 8 + int.from_bytes(whole[:8], "little")
    position = data.draw(st.integers(0, end - 1))
    byte = data.draw(st.integers(0, 255))
    broken = whole[:position] + bytes([byte]) + whole[position + 1 :]
    (folder / "model.safetensors").write_bytes(broken)
    try:
        with loaded(folder, make_spec()) as store:
            found = torch.cat([store.blocks(layer).clone() for layer in range(2)])
    except GreenroomError:
        return
    assert torch.equal(found, expected)
