"""Memory for reading experts: the store, and a little scratch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from greenroom.engine import expert_reader
from greenroom.engine.spec import ExpertLayerSpec, ModelSpec
from greenroom.experts.formats import ExpertFormat
from tests.engine.expert_reading import SILU, STEM, loaded, make_spec, per_expert_tensors


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
from tests.engine.expert_reading import loaded
from tests.engine.test_expert_reader_memory import large_spec, status

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
