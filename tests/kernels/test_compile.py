"""Kernels compile for a GPU that is not there: the interpreter, which runs them in other tests, takes more."""

import os
import pkgutil
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import greenroom.kernels.gpu
from greenroom.experts.dispatch import Dispatch
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.grouped_ffn import GroupedFfn, run_all
from greenroom.experts.grouping import group_pairs
from greenroom.experts.tier import LayerBatch
from greenroom.kernels.gpu.cache_write import write_token
from greenroom.kernels.gpu.decode_attention import decode_attention
from greenroom.kernels.gpu.latent_attention import latent_decode_attention
from greenroom.kernels.gpu.paged_attention import paged_decode_attention
from greenroom.kernels.gpu.rms_norm import rms_norm
from greenroom.kernels.gpu.rope import rotate
from greenroom.kernels.gpu.route import route
from greenroom.kernels.gpu.word_copy import word_copy_kernel
from greenroom.kv import device_copies
from tests.experts.test_decode_path import decode, only, random_batch, run
from tests.kernels.launches import Launch, recorded, save

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU all tests compile")

DTYPE = torch.bfloat16
FORMATS = [
    ExpertFormat(64, 48, DTYPE, Activation(ActivationKind.SILU)),
    ExpertFormat(32, 40, DTYPE, Activation(ActivationKind.SWIGLU_OAI, 1.7, 2.0), bias=True),
    ExpertFormat(40, 24, DTYPE, Activation(ActivationKind.GELU), gated=False),
]


def decode_steps() -> None:
    """Every lane, one token and several, with and without slots."""
    for fmt in FORMATS:
        for tokens, slots in ((1, 0), (1, 4), (3, 4), (16, 4), (3, 8)):
            if tokens == 1 or fmt is FORMATS[0]:
                with decode(fmt, 8, slots, tokens, 2) as (manager, steps):
                    steps.split = only(5, 8)
                    for _ in range(2):
                        run(steps, tokens, 0, random_batch(fmt, 8, tokens, 2))
                    manager.check_invariants()


def attention() -> None:
    """Decode attention over a fixed cache, over blocks, with a window and sinks, and over latents."""
    query, keys = torch.randn(1, 4, 1, 16).to(DTYPE), torch.randn(1, 2, 70, 16).to(DTYPE)
    decode_attention(query, keys, keys, torch.ones(1, 1, 1, 70, dtype=torch.bool), 0.25)
    tables, lengths = torch.tensor([[0, 1], [2, 3]]), torch.tensor([5, 30])
    paged, rows = torch.randn(4 * 16, 2, 16).to(DTYPE), torch.randn(1, 4, 2, 16).to(DTYPE)
    paged_decode_attention(rows, paged, paged, tables, lengths, 16, 0.25)
    paged_decode_attention(rows, paged, paged, tables, lengths, 16, 0.25, window=8, sinks=torch.zeros(4).to(DTYPE))
    latent, rotated = torch.randn(64, 1, 32).to(DTYPE), torch.randn(64, 1, 16).to(DTYPE)
    asked, turned = torch.randn(4, 2, 32).to(DTYPE), torch.randn(4, 2, 16).to(DTYPE)
    latent_decode_attention(asked, turned, latent, rotated, tables, lengths, 16, 0.25)


def many_tokens() -> None:
    """A layer's experts all at once and in groups, with and without biases and gates."""
    for fmt in FORMATS:
        ids = torch.randint(0, 8, (20, 2)).to(torch.int32)
        batch = LayerBatch(0, torch.randn(20, fmt.hidden).to(DTYPE), ids, torch.rand(20, 2))
        blocks = torch.zeros(8, fmt.block_bytes, dtype=torch.uint8)
        run_all(batch, fmt, fmt.views(blocks))
        run_all(replace(batch, ids=ids.long(), weights=batch.weights.to(DTYPE)), fmt, fmt.views(blocks))
        counts = np.bincount(ids.flatten().numpy(), minlength=8)
        group = np.flatnonzero(counts)
        grouping = group_pairs([group], Dispatch(counts, np.empty(0, dtype=np.int64), (group,), group[:0]))
        ffn = GroupedFfn(batch, fmt, 8, torch.from_numpy(grouping.table))
        ffn.add(torch.zeros(20, fmt.hidden), grouping.parts[0], fmt.views(blocks[torch.from_numpy(group)]))


def small_ones() -> None:
    """Norm, rotation, router, copies of blocks and words, a token into a cache."""
    rms_norm(torch.randn(3, 64).to(DTYPE), torch.ones(64).to(DTYPE), 1e-6)
    heads, table = torch.randn(1, 2, 3, 16).to(DTYPE), torch.randn(1, 3, 16).to(DTYPE)
    rotate(heads, heads, table, table)
    for dtype in (DTYPE, torch.float32):
        route(torch.randn(3, 8).to(DTYPE), 2, normalise=True, dtype=dtype)
    blocks = [torch.zeros(4, 16, 8)]
    device_copies._by_kernel(blocks)(0, 1)
    for words in (torch.zeros(37, dtype=torch.int32), torch.zeros(16, dtype=torch.int64)):
        word_copy_kernel[(1,)](words.clone(), words, len(words), BLOCK=64)
    cache, token = torch.zeros(2, 3, 8, 16).to(DTYPE), torch.zeros(2, 3, 1, 16).to(DTYPE)
    write_token(cache, cache.clone(), token, token, torch.zeros(1, dtype=torch.int64))


@pytest.fixture(scope="module")
def launches() -> set[Launch]:
    with recorded() as noted:
        decode_steps()
        attention()
        many_tokens()
        small_ones()
    return noted


def test_every_kernel_is_among_them(launches):
    kernels = {
        name
        for module in pkgutil.iter_modules(greenroom.kernels.gpu.__path__)
        for name in vars(import_module(f"greenroom.kernels.gpu.{module.name}"))
        if name.endswith("_kernel")
    }
    assert {launch.kernel for launch in launches} == kernels


def test_they_compile_for_a_gpu(launches, tmp_path: Path):
    path = tmp_path / "launches"
    save(launches, path)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.launches", str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
