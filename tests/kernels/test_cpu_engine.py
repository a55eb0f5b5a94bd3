"""The native CPU engine against a float64 model of the expert, on every instruction set of this machine."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.native import Isa, supported_isas
from tests.kernels.batches import SILU, Batch, Engines
from tests.kernels.reference import Experts, activate, expert_outputs

ISAS = supported_isas()
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@st.composite
def formats(draw: st.DrawFn) -> ExpertFormat:
    kind = draw(st.sampled_from(ActivationKind))
    limit = draw(st.sampled_from([math.inf, 0.5]))
    gated = kind is ActivationKind.SWIGLU_OAI or draw(st.booleans())
    width = st.one_of(st.integers(1, 70), st.sampled_from([17, 31, 32, 33, 64, 96, 130]))
    return ExpertFormat(
        hidden=draw(width),
        inter=draw(width),
        dtype=draw(st.sampled_from(DTYPES)),
        activation=Activation(kind, alpha=1.702, limit=limit),
        gated=gated,
        bias=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    format=formats(),
    experts=st.integers(1, 6),
    topk=st.integers(1, 8),
    tokens=st.integers(0, 70),
    seed=st.integers(0, 2**31),
)
def test_random_batches(
    engines: Engines, format: ExpertFormat, experts: int, topk: int, tokens: int, seed: int
) -> None:
    batch = Batch(format, experts, topk, tokens, seed)
    for isa in ISAS:
        one = batch.run(engines.get(1, isa))
        batch.check(one, isa)
        for threads in (2, 3):
            assert torch.equal(batch.run(engines.get(threads, isa)), one), f"{isa.label}: {threads} threads differ"


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.label)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("hidden", "inter", "experts", "topk", "tokens"),
    [
        (33, 17, 1, 1, 1),
        (33, 17, 3, 2, 40),
        (256, 160, 4, 2, 3),
        (200, 300, 2, 2, 70),
        (64, 32, 40, 8, 16),
        (1, 1, 2, 1, 20),
        (129, 65, 1, 1, 33),
    ],
)
@pytest.mark.parametrize(("gated", "bias"), [(True, False), (True, True), (False, False), (False, True)])
def test_shapes(
    engines: Engines,
    isa: Isa,
    dtype: torch.dtype,
    hidden: int,
    inter: int,
    experts: int,
    topk: int,
    tokens: int,
    gated: bool,
    bias: bool,
) -> None:
    batch = Batch(ExpertFormat(hidden, inter, dtype, SILU, gated, bias), experts, topk, tokens, seed=hidden + tokens)
    one = batch.run(engines.get(1, isa))
    batch.check(one, isa)
    assert torch.equal(batch.run(engines.get(3, isa)), one)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.label)
@pytest.mark.parametrize("tokens", [16, 17, 32, 48, 63, 64, 65, 112, 129])
@pytest.mark.parametrize("hidden", [64, 80, 95, 97])
def test_every_number_of_token_tiles(engines: Engines, isa: Isa, tokens: int, hidden: int) -> None:
    """AMX takes up to four tiles of 16 tokens at a time, and the second projection's rows in interleaved pairs of
    16: whole pairs, a part of one, and an odd number of rows."""
    batch = Batch(ExpertFormat(hidden, 96, torch.bfloat16, SILU, bias=True), 1, 1, tokens, seed=tokens)
    batch.ids.zero_()
    one = batch.run(engines.get(1, isa))
    batch.check(one, isa)
    assert torch.equal(batch.run(engines.get(3, isa)), one)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.label)
def test_wide_experts_with_many_tokens(engines: Engines, isa: Isa) -> None:
    """More hidden bytes than one pass of AMX takes, more rows than one block, more claims than one a thread."""
    format = ExpertFormat(2048, 160, torch.bfloat16, SILU)
    generator = torch.Generator().manual_seed(5)
    batch = Batch(format, 2, 2, 300, seed=5)
    batch.ids.copy_(torch.randint(0, 2, batch.ids.shape, generator=generator))
    out = batch.run(engines.get(2, isa))
    assert torch.equal(batch.run(engines.get(1, isa)), out)
    rows = torch.tensor([0, 1, 15, 16, 130, 255, 256, 299])
    batch.hidden, batch.ids, batch.weights = batch.hidden[rows], batch.ids[rows], batch.weights[rows]
    batch.check(out[rows], isa)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.label)
def test_batches_of_several_slices(engines: Engines, isa: Isa) -> None:
    """Batches above the engine's limit of tokens at a time."""
    batch = Batch(ExpertFormat(8, 8, torch.bfloat16, SILU), 3, 1, 9000, seed=6)
    out = batch.run(engines.get(2, isa))
    assert torch.equal(batch.run(engines.get(1, isa)), out)
    rows = torch.tensor([0, 4095, 4096, 4097, 8191, 8192, 8999])
    batch.hidden, batch.ids, batch.weights = batch.hidden[rows], batch.ids[rows], batch.weights[rows]
    batch.check(out[rows], isa)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.label)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_addresses_do_not_matter(engines: Engines, isa: Isa, dtype: torch.dtype) -> None:
    format = ExpertFormat(130, 50, dtype, SILU, bias=True)
    here = Batch(format, 4, 3, 40, seed=1)
    there = Batch(format, 4, 3, 40, seed=1, offset=64 * 7)
    assert torch.equal(here.run(engines.get(2, isa)), there.run(engines.get(2, isa)))
    # Blocks scattered in another order of addresses, as after cache swaps.
    moved = Experts(format, 4, torch.Generator().manual_seed(9))
    order = torch.tensor([2, 0, 3, 1])
    moved.blocks[order] = here.experts.blocks
    out = torch.full((40, 130), math.nan)
    addresses = moved.addresses[order.numpy()].copy()
    engines.get(2, isa).run(format, addresses, here.hidden, here.ids, here.weights, out)
    assert torch.equal(out, here.run(engines.get(2, isa)))


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.label)
def test_sentinels_and_repeats(engines: Engines, isa: Isa) -> None:
    batch = Batch(ExpertFormat(40, 24, torch.float32, SILU), 3, 4, 5, seed=2)
    batch.ids = torch.tensor(
        [[-1, -1, -1, -1], [3, 4, 2**31 - 1, -(2**31)], [1, 1, 1, 1], [2, -1, 2, 0], [0, 1, 2, 3]], dtype=torch.int32
    )
    addresses = batch.experts.addresses
    out = batch.run(engines.get(2, isa))
    batch.check(out, isa)
    assert not out[:2].any()
    # Experts that nobody chose need no block.
    batch.ids[batch.ids == 1] = -1
    addresses[1] = 0
    sparse = torch.full_like(out, math.nan)
    engines.get(2, isa).run(batch.format, addresses, batch.hidden, batch.ids, batch.weights, sparse)
    batch.check(sparse, isa)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    format=formats(),
    parts=st.integers(1, 9),
    width=st.integers(1, 200),
    experts=st.integers(1, 4),
    tokens=st.integers(1, 70),
    expert=st.integers(-1, 4),
    seed=st.integers(0, 2**31),
)
def test_divided_experts(
    engines: Engines,
    format: ExpertFormat,
    parts: int,
    width: int,
    experts: int,
    tokens: int,
    expert: int,
    seed: int,
) -> None:
    """The first rows in float64 and the others by the engine are the whole, whichever row is the first here."""
    batch = Batch(replace(format, inter=32 * parts + width), experts, 3, tokens, seed)
    batch.divided = (expert, 32 * parts)
    for isa in ISAS:
        one = batch.run(engines.get(1, isa))
        batch.check(one, isa)
        for threads in (2, 3):
            assert torch.equal(batch.run(engines.get(threads, isa)), one), f"{isa.label}: {threads} threads differ"


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.label)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 5, 40])
@pytest.mark.parametrize(("hidden", "inter", "first"), [(256, 320, 32), (256, 320, 288), (100, 161, 160), (70, 99, 64)])
def test_a_divided_experts_first_rows_do_not_matter(
    engines: Engines, isa: Isa, dtype: torch.dtype, gated: bool, tokens: int, hidden: int, inter: int, first: int
) -> None:
    batch = Batch(ExpertFormat(hidden, inter, dtype, SILU, gated, bias=True), 3, 3, tokens, seed=inter)
    batch.ids.copy_(torch.arange(3))
    batch.divided = (1, first)
    one = batch.run(engines.get(1, isa))
    batch.check(one, isa)
    views = batch.experts.views
    assert views.up_bias is not None
    views.down[1, :, :first] = math.nan
    for start in (0, inter) if gated else (0,):
        views.up[1, start : start + first] = math.nan
        views.up_bias[1, start : start + first] = math.nan
    for threads in (1, 2, 3):
        assert torch.equal(batch.run(engines.get(threads, isa)), one)


_PROTECTED_ROWS = """
import ctypes, mmap
import numpy as np, torch
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.native import supported_isas
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat

PAGE = mmap.PAGESIZE
first = PAGE // 2  # a page of a row of the second projection
fmt = ExpertFormat(64, 2 * first, torch.bfloat16, Activation(ActivationKind.SILU))
memory = mmap.mmap(-1, -(-fmt.block_bytes // PAGE) * PAGE)
start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
mprotect = ctypes.CDLL(None, use_errno=True).mprotect

def protect(at, size):
    assert at % PAGE == 0 and size % PAGE == 0
    assert mprotect(ctypes.c_void_p(start + at), ctypes.c_size_t(size), 0) == 0

up, down, *_ = fmt.offsets
row = fmt.hidden * 2
for matrix in (0, fmt.inter):
    protect(up + matrix * row, first * row)
for column in range(fmt.hidden):
    protect(down + column * fmt.inter * 2, first * 2)
for isa in supported_isas():
    for tokens in (1, 3, 40):
        out = torch.empty(tokens, fmt.hidden)
        with CpuExperts(2, None, isa) as engine:
            engine.run(
                fmt,
                np.array([start], dtype=np.uint64),
                torch.ones(tokens, fmt.hidden, dtype=torch.bfloat16),
                torch.zeros(tokens, 1, dtype=torch.int32),
                torch.ones(tokens, 1),
                out,
                (0, first),
            )
        assert not out.any()
print("never touched")
"""


def test_a_divided_experts_first_rows_are_not_read() -> None:
    """In a process of its own, which reading them would end."""
    done = subprocess.run([sys.executable, "-c", _PROTECTED_ROWS], capture_output=True, text=True, check=False)
    assert done.stdout == "never touched\n", f"status {done.returncode}: {done.stderr}"


def test_dividing_an_expert_that_nobody_chose(engines: Engines) -> None:
    batch = Batch(ExpertFormat(40, 64, torch.bfloat16, SILU, bias=True), 4, 2, 5, seed=3)
    batch.ids.clamp_(max=2)
    whole = batch.run(engines.get(2, Isa.AUTO))
    for divided in ((3, 32), (4, 32), (2**31 - 1, 32), (-1, 32), (-1, 0), (-(2**31), -7)):
        batch.divided = divided
        assert torch.equal(batch.run(engines.get(2, Isa.AUTO)), whole)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.label)
@pytest.mark.parametrize("kind", [kind for kind in ActivationKind if kind is not ActivationKind.SWIGLU_OAI])
def test_activation_accuracy(engines: Engines, isa: Isa, kind: ActivationKind) -> None:
    """One weight of 1 on either side of the activation: the output is the activation itself."""
    format = ExpertFormat(1, 1, torch.float32, Activation(kind), gated=False)
    experts = Experts(format, 1, torch.Generator().manual_seed(0))
    experts.views.up.fill_(1)
    experts.views.down.fill_(1)
    x = torch.cat([torch.linspace(-100, 100, 4001), torch.tensor([0.0, 1e-30, -1e-30, 1e4, -1e4, 1e15, -1e15])])
    out = torch.full((len(x), 1), math.nan)
    ids, weights = torch.zeros(len(x), 1, dtype=torch.int32), torch.ones(len(x), 1)
    engines.get(1, isa).run(format, experts.addresses, x[:, None], ids, weights, out)
    want = activate(format, x[:, None].double())
    error = (out.double() - want).abs() - 1e-6 * want.abs()
    # Where the result vanishes beside its input, the input's rounding is what counts.
    assert float((error / x[:, None].double().abs().clamp(min=1)).max()) < 2e-8


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.label)
@pytest.mark.parametrize("tokens", [1, 20])
def test_nan_and_infinity_stay_with_their_token(engines: Engines, isa: Isa, tokens: int) -> None:
    batch = Batch(ExpertFormat(64, 32, torch.bfloat16, SILU), 1, 1, tokens + 2, seed=3)
    batch.ids.zero_()
    clean = batch.run(engines.get(1, isa))
    batch.hidden[0, 5] = math.nan
    batch.hidden[1, 7] = math.inf
    out = batch.run(engines.get(1, isa))
    assert out[0].isnan().all()
    assert not out[1].isfinite().any()
    assert torch.equal(out[2:], clean[2:])


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.label)
def test_half_precision_subnormals(engines: Engines, isa: Isa) -> None:
    """Hidden states that are fp16 subnormals and weights that bring them back to ordinary numbers."""
    batch = Batch(ExpertFormat(32, 16, torch.float16, SILU), 2, 1, 9, seed=4)
    batch.hidden.mul_(2**-16)
    batch.experts.views.up.mul_(2**9)
    batch.experts.views.down.mul_(2**9)
    reference, _ = expert_outputs(batch.experts, batch.hidden, batch.ids, batch.weights)
    torch.testing.assert_close(batch.run(engines.get(1, isa)).double(), reference, rtol=1e-4, atol=1e-4)


def test_empty_batches(engines: Engines) -> None:
    for tokens, topk, experts in ((0, 2, 3), (0, 0, 0), (3, 0, 2), (3, 2, 0)):
        format = ExpertFormat(40, 24, torch.bfloat16, SILU)
        blocks = Experts(format, max(experts, 1), torch.Generator())
        out = torch.full((tokens, 40), math.nan)
        engines.get(2, Isa.AUTO).run(
            format,
            blocks.addresses[:experts],
            torch.zeros(tokens, 40, dtype=torch.bfloat16),
            torch.zeros(tokens, topk, dtype=torch.int32),
            torch.zeros(tokens, topk),
            out,
        )
        assert not out.any()
