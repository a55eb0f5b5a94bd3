"""Reading experts into the store: the bits that stock transformers would load, or an error."""

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from greenroom.engine import expert_reader
from greenroom.engine.checkpoint import Checkpoint
from greenroom.engine.expert_keys import is_expert_key, place_experts
from greenroom.engine.expert_reader import plan_reads, read_experts
from greenroom.engine.inspect import inspect_model
from greenroom.engine.spec import ExpertLayerSpec, ModelSpec
from greenroom.errors import CheckpointError, GreenroomError
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.store import HostStore
from tests.reference.families import FAMILIES, make_model

E, H, I = 5, 6, 4  # noqa: E741 (experts, hidden, inter)
STEM = "model.layers.{}.mlp.experts"
SILU = Activation(ActivationKind.SILU)


def make_spec(dtype: torch.dtype = torch.bfloat16, layers: int = 2, **changes) -> ModelSpec:
    layout = {key: changes.pop(key) for key in ("transposed", "interleaved") if key in changes}
    fmt = ExpertFormat(H, I, dtype, SILU, **changes)
    return ModelSpec(tuple(ExpertLayerSpec(STEM.format(n), n, E, fmt, **layout) for n in range(layers)), 0, dtype)


@contextmanager
def loaded(folder: Path, spec: ModelSpec, threads: int = 4, progress=None) -> Iterator[HostStore]:
    with (
        Checkpoint.open(folder) as checkpoint,
        HostStore([layer.format for layer in spec.layers], [layer.num_experts for layer in spec.layers]) as store,
    ):
        for layer in range(len(store)):
            store.blocks(layer).fill_(0xA5)
        read_experts(checkpoint, place_experts(checkpoint.tensors, spec), spec, store, progress, threads)
        yield store


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(bits(found), bits(expected))


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


def per_expert_tensors(dtype: torch.dtype, layers: int = 2) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    return {
        f"{STEM.format(n)}.{e}.{name}.weight": torch.randn(shape).to(dtype)
        for n in range(layers)
        for e in range(E)
        for name, shape in shapes.items()
    }


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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


def random_bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bit pattern: infinities, denormals, NaNs with payloads."""
    size = dtype.itemsize
    tensor = torch.randint(0, 256, (*shape, size), dtype=torch.uint8).view(dtype).squeeze(-1).clone()
    flat = tensor.view(-1).view({2: torch.int16, 4: torch.int32}[size])
    signalling = {torch.bfloat16: 0x7F81, torch.float16: 0x7C01, torch.float32: 0x7F800001}[dtype]
    flat[:: max(1, flat.numel() // 7)] = signalling
    return tensor


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


@pytest.mark.parametrize("threads", [1, 2, 7, 1000])
def test_progress_rises_to_the_total(threads, tmp_path):
    save_file(per_expert_tensors(torch.float32), tmp_path / "model.safetensors")
    calls: list[tuple[int, int]] = []
    here = threading.get_ident()

    def progress(done: int, total: int) -> None:
        assert threading.get_ident() == here
        calls.append((done, total))

    with loaded(tmp_path, make_spec(), threads, progress):
        total = 2 * E * 3 * I * H * 4
        assert {shown for _, shown in calls} == {total}
        assert [done for done, _ in calls] == sorted({done for done, _ in calls})
        assert calls[-1][0] == total


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-experts")]


def failing_on(monkeypatch: pytest.MonkeyPatch, bad: str) -> list[str]:
    """Makes the read of ``bad`` fail; returns the names that were read."""
    real: Callable[..., None] = Checkpoint.read_into
    seen: list[str] = []

    def read_into(self, entry, destination, skip=0):
        seen.append(entry.name)
        if entry.name == bad:
            raise CheckpointError(f"{entry.file}: cannot read tensor '{entry.name}' (broken)")
        threading.Event().wait(0.001)
        real(self, entry, destination, skip)

    monkeypatch.setattr(Checkpoint, "read_into", read_into)
    return seen


@pytest.mark.parametrize("threads", [1, 4])
def test_a_failure_stops_every_thread(threads, tmp_path, monkeypatch):
    """At once, however long the caller's progress takes."""
    tensors = per_expert_tensors(torch.bfloat16, layers=40)
    save_file(tensors, tmp_path / "model.safetensors")
    bad = f"{STEM.format(0)}.4.down_proj.weight"
    seen = failing_on(monkeypatch, bad)

    def progress(done: int, total: int) -> None:
        threading.Event().wait(0.05)

    with (
        pytest.raises(CheckpointError, match=rf"model\.safetensors: cannot read tensor '{bad}' \(broken\)"),
        loaded(tmp_path, make_spec(layers=40), threads, progress),
    ):
        pass
    assert not reader_threads()
    assert len(seen) < 50


def test_a_failing_progress_stops_every_thread(tmp_path, monkeypatch):
    tensors = per_expert_tensors(torch.bfloat16, layers=40)
    save_file(tensors, tmp_path / "model.safetensors")
    seen = failing_on(monkeypatch, "")

    def progress(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), loaded(tmp_path, make_spec(layers=40), 4, progress):
        pass
    assert not reader_threads()
    assert len(seen) < len(tensors) // 2


def test_threads_do_not_outlive_a_good_run(tmp_path):
    save_file(per_expert_tensors(torch.bfloat16), tmp_path / "model.safetensors")
    with loaded(tmp_path, make_spec()):
        assert not reader_threads()


def test_scratch_is_small_and_only_for_conversions(tmp_path, monkeypatch):
    sizes: list[int] = []
    real = torch.empty

    def empty(*shape, **options):
        sizes.append(real(*shape, **options).nbytes)
        return real(*shape, **options)

    hidden, inter = 1000, 40
    tensors = {
        f"{STEM.format(0)}.gate_up_proj": torch.randn(2, hidden, 2 * inter),
        f"{STEM.format(0)}.down_proj": torch.randn(2, inter, hidden),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(expert_reader.torch, "empty", empty)
    monkeypatch.setattr(expert_reader, "SCRATCH_BYTES", 50_000)
    fmt = ExpertFormat(hidden, inter, torch.bfloat16, SILU)
    spec = ModelSpec((ExpertLayerSpec(STEM.format(0), 0, 2, fmt, True, True),), 0, torch.bfloat16)
    with loaded(tmp_path, spec) as store:
        assert torch.equal(
            store.views(0).up[1, inter:], tensors[f"{STEM.format(0)}.gate_up_proj"][1, :, 1::2].t().bfloat16()
        )
        # 64 rows at least, even where they are wider than the limit.
        assert max(sizes) == max(128 * 2 * inter * 4, 40 * hidden * 4)
        sizes.clear()
    save_file(per_expert_tensors(torch.bfloat16, 1), tmp_path / "model.safetensors")
    with loaded(tmp_path, make_spec(layers=1)):
        assert not any(sizes), "a tensor that fits as it is must not be copied on its way"


LARGE = 72
"""Experts; beside them the fixed cost of the first run of a few torch kernels is small."""

PEAK = """
import sys
from pathlib import Path
from tests.engine.test_expert_reader import large_spec, loaded, status

before = status("VmRSS")
with loaded(Path(sys.argv[1]), large_spec(sys.argv[2])) as store:
    print((status("VmHWM") - before) / store.nbytes)
"""


def status(key: str) -> int:
    """Bytes of a line like 'VmHWM: 1234 kB'."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def large_spec(layout: str) -> ModelSpec:
    fmt = ExpertFormat(2048, 1024, torch.bfloat16, SILU)
    odd = layout == "transposed"
    return ModelSpec((ExpertLayerSpec(STEM.format(0), 0, LARGE, fmt, odd, odd),), 0, torch.bfloat16)


@pytest.mark.parametrize("layout", ["as stored", "transposed"])
def test_peak_memory_is_the_model(layout, tmp_path):
    """Nearly a gigabyte of experts: nothing but the store and a little scratch comes into memory."""
    up, down = ((2048, 2048), (1024, 2048)) if layout == "transposed" else ((2048, 2048), (2048, 1024))
    tensors = {
        f"{STEM.format(0)}.gate_up_proj": torch.zeros(LARGE, *up, dtype=torch.bfloat16),
        f"{STEM.format(0)}.down_proj": torch.zeros(LARGE, *down, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    command = [sys.executable, "-c", PEAK, str(tmp_path), layout]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert 0.9 < float(done.stdout) <= 1.05


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


def test_specs_are_followed_not_file_order(tmp_path):
    """Layers of the spec in another order than in the file still get their own weights."""
    tensors = per_expert_tensors(torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    spec = make_spec()
    swapped = dataclasses.replace(spec, layers=spec.layers[::-1])
    with loaded(tmp_path, swapped) as store:
        assert_same_bits(store.views(0).down[2], tensors[f"{STEM.format(1)}.2.down_proj.weight"])
        assert_same_bits(store.views(1).down[2], tensors[f"{STEM.format(0)}.2.down_proj.weight"])
