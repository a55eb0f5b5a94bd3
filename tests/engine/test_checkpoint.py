"""Checkpoint: every byte of a good one, and a sentence for every way to be a bad one."""

import json
import os
import struct
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from greenroom.engine import checkpoint as checkpoint_module
from greenroom.engine.checkpoint import Checkpoint
from greenroom.errors import CheckpointError, GreenroomError, UnsupportedModelError

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {f"t.{dtype}": (torch.randn(5, 7) * 9).to(dtype) for dtype in DTYPES}
    found |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "cube": torch.randn(3, 4, 5)}
    found["fp8"] = torch.randn(4, 4).to(torch.float8_e4m3fn)
    return found


def write_sharded(folder: Path) -> dict[str, torch.Tensor]:
    everything = tensors()
    names = sorted(everything)
    halves = names[::2], names[1::2]
    for shard, half in zip(SHARDS, halves, strict=True):
        save_file({name: everything[name] for name in half}, folder / shard)
    weight_map = {name: shard for shard, half in zip(SHARDS, halves, strict=True) for name in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return everything


def write_raw(file: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def entry(start: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("sharded", [False, True])
def test_every_tensor_comes_back(tmp_path, sharded):
    if sharded:
        expected = write_sharded(tmp_path)
    else:
        expected = tensors()
        save_file(expected, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(expected)
        for name, tensor in expected.items():
            found = checkpoint.tensors[name]
            assert (found.dtype, found.shape) == (tensor.dtype, tuple(tensor.shape))
            assert found.nbytes == tensor.numel() * tensor.itemsize
            destination = torch.empty_like(tensor)
            checkpoint.read_into(found, destination)
            assert same_bits(destination, tensor)


def test_parts_of_a_tensor(tmp_path):
    cube = torch.randn(3, 4, 5)
    save_file({"cube": cube}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        found = checkpoint.tensors["cube"]
        middle = torch.empty(4, 5)
        checkpoint.read_into(found, middle, skip=80)
        assert torch.equal(middle, cube[1])
        buffer = bytearray(8)
        checkpoint.read_into(found, memoryview(buffer), skip=232)
        assert bytes(buffer) == cube.numpy().tobytes()[232:]
        for skip in (-1, 81, 240):
            with pytest.raises(ValueError, match="not inside 'cube'"):
                checkpoint.read_into(found, torch.empty(40), skip=skip)
        with pytest.raises(ValueError, match="contiguous"):
            checkpoint.read_into(found, torch.empty(4, 3).t())


def test_a_dtype_that_torch_lacks_keeps_its_name(tmp_path):
    write_raw(tmp_path / "model.safetensors", {"x": entry(0, 3, [6], "F4")}, b"abc")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.tensors["x"].dtype == "F4"


def test_short_reads_are_continued(tmp_path, monkeypatch):
    data = torch.randn(1000)
    save_file({"x": data}, tmp_path / "model.safetensors")
    real = os.preadv
    monkeypatch.setattr(checkpoint_module.os, "preadv", lambda fd, views, at: real(fd, [views[0][:7]], at))
    with Checkpoint.open(tmp_path) as checkpoint:
        found = torch.empty(1000)
        checkpoint.read_into(checkpoint.tensors["x"], found)
    assert torch.equal(found, data)


def test_read_error_names_file_and_tensor(tmp_path, monkeypatch):
    save_file({"x": torch.randn(4)}, tmp_path / "model.safetensors")

    def fail(*_):
        raise OSError(5, "Input/output error")

    with Checkpoint.open(tmp_path) as checkpoint:
        monkeypatch.setattr(checkpoint_module.os, "preadv", fail)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot read tensor 'x' \(Input/output"):
            checkpoint.read_into(checkpoint.tensors["x"], torch.empty(4))


def test_a_file_that_shrinks_after_opening(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.randn(100)}, file)
    with Checkpoint.open(tmp_path) as checkpoint:
        os.truncate(file, file.stat().st_size - 10)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated.*'x', 10 bytes short"):
            checkpoint.read_into(checkpoint.tensors["x"], torch.empty(100))


def test_descriptors_are_pooled_and_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "OPEN_FILES", 2)
    weight_map = {f"t{n}": f"part{n}.safetensors" for n in range(8)}
    for n, (name, shard) in enumerate(weight_map.items()):
        save_file({name: torch.full((1000,), float(n))}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    def open_shards() -> int:
        links = (Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd"))
        return sum(link.is_symlink() and os.readlink(link).startswith(str(tmp_path)) for link in links)

    wrong: list[int] = []

    def read_all(checkpoint: Checkpoint, shift: int) -> None:
        for n in range(400):
            number = (n + shift) % 8
            found = torch.empty(1000)
            checkpoint.read_into(checkpoint.tensors[f"t{number}"], found)
            if not torch.all(found == number):
                wrong.append(number)

    with Checkpoint.open(tmp_path) as checkpoint:
        threads = [threading.Thread(target=read_all, args=(checkpoint, 3 * n)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert 1 <= open_shards() <= 2
    assert open_shards() == 0
    with pytest.raises(ValueError, match="closed"):
        checkpoint.read_into(checkpoint.tensors["t0"], torch.empty(1000))


HEADERS = {
    "no json": (b"{not json", "header is corrupt"),
    "not utf-8": (b"\xff\xfe{}", "header is corrupt"),
    "deep": (b"[" * 200_000, "header is corrupt"),
    "list": (b"[]", "header is corrupt"),
    "twice": (b'{"x": {}, "x": {}}', "twice"),
    "no entry": ({"x": 3}, "entry for tensor 'x' is corrupt"),
    "no dtype": ({"x": {"shape": [4], "data_offsets": [0, 4]}}, "'x' is corrupt"),
    "negative": ({"x": entry(0, 4, [-4])}, "'x' is corrupt"),
    "boolean": ({"x": entry(0, 4, [True, 4])}, "'x' is corrupt"),
    "float": ({"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4.0]}}, "'x' is corrupt"),
    "backwards": ({"x": {"dtype": "U8", "shape": [4], "data_offsets": [4, 0]}}, "'x' is corrupt"),
    "three offsets": ({"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 2, 4]}}, "'x' is corrupt"),
    "size": ({"x": entry(0, 4, [2, 3])}, "'x' of shape .2, 3. and dtype U8 needs 6 bytes.* gives it 4"),
    "overlap": ({"x": entry(0, 3), "y": entry(2, 4)}, "tensor 'y' overlaps tensor 'x'"),
    "gap": ({"x": entry(0, 1), "y": entry(2, 4)}, "1 bytes before tensor 'y' belong to no tensor"),
    "beyond": ({"x": entry(0, 4), "y": entry(4, 9)}, "truncated: tensor 'y' ends at byte"),
    "tail": ({"x": entry(0, 3)}, "1 bytes after tensor 'x' belong to no tensor"),
}


@pytest.mark.parametrize(("header", "message"), HEADERS.values(), ids=HEADERS.keys())
def test_bad_headers(tmp_path, header, message):
    write_raw(tmp_path / "model.safetensors", header, b"1234")
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{message}"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("length", [3, 2**40, 2**63])
def test_header_longer_than_the_file(tmp_path, length):
    write_raw(tmp_path / "model.safetensors", b"{}", length=length)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or no safetensors file"):
        Checkpoint.open(tmp_path)


def test_missing_shard_is_named(tmp_path):
    write_sharded(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"{SHARDS[1]} is missing; the index expects tensor '.+' in it"):
        Checkpoint.open(tmp_path)


def test_index_that_disagrees_with_a_shard(tmp_path):
    everything = write_sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    for shard, name in (
        (SHARDS[1], "ghost"),
        (SHARDS[1], next(n for n in weight_map if weight_map[n] == SHARDS[0])),
    ):
        index.write_text(json.dumps({"weight_map": weight_map | {name: shard}}))
        with pytest.raises(CheckpointError, match=rf"{shard} lacks tensor '{name}'"):
            Checkpoint.open(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map}))
    save_file(everything, tmp_path / SHARDS[1])
    with pytest.raises(CheckpointError, match=r"tensor '.+' is in two files, .*00001.* and .*00002"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "index is corrupt"),
        ("[]", "index is corrupt"),
        ("{}", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {"x": 1}}', "tensor 'x' is said to be in 1"),
        ('{"weight_map": {"x": "../x.safetensors"}}', "names no shard"),
        ('{"weight_map": {"x": "/etc/passwd"}}', "names no shard"),
    ],
)
def test_bad_index(tmp_path, content, message):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"index\.json.*{message}"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"), [("pytorch_model.bin", r"\.bin"), ("m.gguf", "GGUF"), ("consolidated.00.pth", r"\.pth")]
)
def test_other_formats_are_named(tmp_path, name, kind):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=rf"{kind} weights \({name}\)"):
        Checkpoint.open(tmp_path)


def test_no_weights_at_all(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json$"):
        Checkpoint.open(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"x\.safetensors is there, but no index names it"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="there is no folder"):
        Checkpoint.open(tmp_path / "nowhere")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("small")
    save_file({"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16()}, folder / "model.safetensors")
    return folder, (folder / "model.safetensors").read_bytes()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_truncation_passes(small, data):
    folder, whole = small
    (folder / "model.safetensors").write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Checkpoint.open(folder)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_refused_or_harmless(small, data):
    """Whatever byte of the header changes: an error of ours, or tensors that lie inside the file."""
    folder, whole = small
    position = data.draw(st.integers(0, 8 + int.from_bytes(whole[:8], "little") - 1))
    broken = whole[:position] + bytes([data.draw(st.integers(0, 255))]) + whole[position + 1 :]
    (folder / "model.safetensors").write_bytes(broken)
    try:
        checkpoint = Checkpoint.open(folder)
    except GreenroomError:
        return
    with checkpoint:
        for found in checkpoint.tensors.values():
            checkpoint.read_into(found, memoryview(bytearray(found.nbytes)))
