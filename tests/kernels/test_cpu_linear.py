"""The engine's products of a few rows with a dense matrix: right, in any batch, by any number of threads."""

import ctypes
import math
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.errors import EngineError
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.formats import ExpertFormat
from greenroom.experts.native import Isa, supported_isas
from greenroom.kernels.cpu.library import NativeLinear, last_error, load_library
from tests.kernels.batches import SILU, Batch, Engines

ISAS = supported_isas()
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Product:
    """A random matrix, rows and a bias. Around each lie NaNs: whoever reads past it gets one."""

    def __init__(self, rows: int, width: int, tokens: int, dtype: torch.dtype, seed: int, bias: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)

        def guarded(*shape: int) -> torch.Tensor:
            numbers = torch.randn(shape, generator=generator)
            memory = torch.full((numbers.numel() + 141,), math.nan, dtype=dtype)
            inner = memory[seed % 13 + 64 :][: numbers.numel()]  # addresses of every kind
            return inner.view(shape).copy_(numbers)

        self.weight = guarded(rows, width).mul_(width**-0.5)
        self.x = guarded(tokens, width)
        self.bias = guarded(rows) if bias else None

    def run(self, engine: CpuExperts, tokens: slice = slice(None)) -> torch.Tensor:
        """The engine's product, written over NaN; fails if it writes past it."""
        x = self.x[tokens]
        shape = (x.shape[0], self.weight.shape[0])
        memory = torch.full((shape[0] * shape[1] + 64,), math.nan, dtype=x.dtype)
        out = memory[32:-32].view(shape)
        assert engine.linear(self.weight, x, self.bias, out) is out
        assert memory[:32].isnan().all()
        assert memory[-32:].isnan().all()
        return out.clone()

    def check(self, out: torch.Tensor) -> None:
        """Fails if ``out`` is further from float64 than sums in fp32 and one rounding explain."""
        weight, x = self.weight.double(), self.x.double()
        reference, size = x @ weight.T, x.abs() @ weight.T.abs()
        if self.bias is not None:
            reference += self.bias.double()
            size += self.bias.double().abs()
        info = torch.finfo(out.dtype)
        error = (out.double() - reference).abs()
        bound = reference.abs() * info.eps / 2 + size * 1e-5 + info.smallest_normal * info.eps
        assert bool((error <= bound).all()), f"error {float((error / bound).max()):.3g} of the bound"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.one_of(st.integers(1, 200), st.integers(1, 1500)),
    width=st.one_of(st.integers(1, 70), st.integers(1, 700)),
    tokens=st.integers(1, 64),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_random_products(
    engines: Engines, rows: int, width: int, tokens: int, dtype: torch.dtype, bias: bool, seed: int
) -> None:
    product = Product(rows, width, tokens, dtype, seed, bias)
    for isa in ISAS:
        one = product.run(engines.get(1, isa))
        product.check(one)
        for threads in (2, 3):
            assert torch.equal(product.run(engines.get(threads, isa)), one), f"{isa.label}: {threads} threads differ"


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.label)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_row_is_the_same_alone(engines: Engines, isa: Isa, dtype: torch.dtype, batch_invariant: bool) -> None:
    """Rows of many steps, whose order of adding shows; more than one pass takes; on either kind of engine."""
    product = Product(1003, 777, 70, dtype, seed=5)
    engine = engines.get(2, isa, batch_invariant)
    whole = product.run(engine)
    product.check(whole)
    for size in (1, 2, 3, 5, 17, 64):
        for first in range(0, 70, size):
            tokens = slice(first, first + size)
            assert torch.equal(product.run(engine, tokens), whole[tokens]), f"{size} from {first}"
    assert torch.equal(product.run(engines.get(1, isa)), whole)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.label)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_rounded_as_torch_rounds_them(engines: Engines, isa: Isa, dtype: torch.dtype) -> None:
    """Sums of two numbers, each of which fp32 holds or rounds once: ties, subnormals of fp16, infinities, NaN."""
    generator = torch.Generator().manual_seed(1)
    lowest = -24 if dtype is torch.float16 else -100
    exponents = torch.randint(lowest, 16, (40000, 1), generator=generator)
    exponents = exponents - torch.randint(0, 13, (40000, 2), generator=generator)
    numbers = (torch.randn(40000, 2, generator=generator) * 2.0 ** exponents.clamp(min=lowest)).to(dtype)
    special = torch.tensor([math.inf, -math.inf, math.nan, 0, -1, 65504, 16, 15.9, 2**-14, 2**-24]).to(dtype)
    weight = torch.cat([numbers, torch.cartesian_prod(special, special)])
    out = engines.get(2, isa).linear(weight, torch.ones(1, 2, dtype=dtype))
    want = (weight[:, 0].float() + weight[:, 1].float()).to(dtype)
    torch.testing.assert_close(out[0], want, rtol=0, atol=0, equal_nan=True)


def test_shapes_of_x_and_no_out(engines: Engines) -> None:
    product = Product(33, 20, 24, torch.bfloat16, seed=2)
    engine = engines.get(2, Isa.AUTO)
    whole = product.run(engine)
    for shape in ((24,), (2, 12), (2, 3, 4)):
        out = engine.linear(product.weight, product.x.view(*shape, 20), product.bias)
        assert out.shape == (*shape, 33)
        assert torch.equal(out.view(24, 33), whole)
    assert torch.equal(engine.linear(product.weight, product.x[3], product.bias), whole[3])
    assert engine.linear(product.weight, product.x[:0]).shape == (0, 33)
    assert engine.linear(product.weight, torch.zeros(2, 0, 20, dtype=torch.bfloat16)).shape == (2, 0, 33)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.label)
def test_nan_and_infinity_stay_with_their_row(engines: Engines, isa: Isa) -> None:
    product = Product(40, 100, 6, torch.bfloat16, seed=3)
    clean = product.run(engines.get(2, isa))
    product.x[0, 5] = math.nan
    product.x[1, 7] = math.inf
    out = product.run(engines.get(2, isa))
    assert out[0].isnan().all()
    assert not out[1].isfinite().any()
    assert torch.equal(out[2:], clean[2:])


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.label)
def test_in_turn_with_expert_jobs(engines: Engines, isa: Isa) -> None:
    """Good and bad ones, submitted and not yet waited for."""
    engine = engines.get(2, isa)
    batch = Batch(ExpertFormat(64, 32, torch.bfloat16, SILU), 3, 2, 40, seed=0)
    batch.ids.clamp_(0, 2)
    product = Product(600, 64, 4, torch.bfloat16, seed=4)
    want, experts_want = product.run(engine), batch.run(engine)
    args = (batch.hidden, batch.ids, batch.weights)
    for _ in range(50):
        outs = [torch.full((40, 64), math.nan) for _ in range(3)]
        jobs = [engine.submit(batch.format, batch.experts.addresses, *args, out) for out in outs[:2]]
        bad = engine.submit(batch.format, batch.experts.addresses * 0, *args, torch.empty(40, 64))
        assert torch.equal(product.run(engine), want)
        jobs.append(engine.submit(batch.format, batch.experts.addresses, *args, outs[2]))
        for job in jobs:
            job.wait()
        with pytest.raises(EngineError, match="has no block"):
            bad.wait()
        assert all(torch.equal(out, experts_want) for out in outs)


def test_from_two_threads_while_the_engine_closes() -> None:
    """Every product that was begun is right; later ones are refused."""
    products = [Product(500, 300, tokens, torch.bfloat16, seed=tokens) for tokens in (1, 5)]
    with CpuExperts(2) as engine:
        wants = [product.run(engine) for product in products]
        many, ends = threading.Semaphore(0), []

        def work(product: Product, want: torch.Tensor) -> None:
            try:
                while torch.equal(product.run(engine), want):
                    many.release()
                ends.append("wrong")
            except EngineError as error:
                ends.append(str(error))

        workers = [threading.Thread(target=work, args=pair) for pair in zip(products, wants, strict=True)]
        for worker in workers:
            worker.start()
        for _ in range(200):
            assert many.acquire(timeout=60)
    for worker in workers:
        worker.join()
    assert ends == ["the CPU engine is closed"] * 2


def test_what_is_refused(engines: Engines) -> None:
    engine = engines.get(2, Isa.AUTO)
    good = {
        "weight": torch.ones(6, 4),
        "x": torch.ones(2, 4),
        "bias": torch.ones(6),
        "out": torch.empty(2, 6),
    }
    for name, wrongs in {
        "weight": (torch.ones(4, 6).T, torch.ones(1, 6, 4), torch.ones(6, 4).double(), torch.ones(6, 4, device="meta")),
        "x": (torch.ones(2, 5), torch.ones(2, 4).half(), torch.ones(4, 2).T, torch.tensor(1.0)),
        "bias": (torch.ones(5), torch.ones(6).half(), torch.ones(12)[::2], torch.ones(6, device="meta")),
        "out": (torch.empty(2, 5), torch.empty(6), torch.empty(2, 6).half(), torch.empty(6, 2).T),
    }.items():
        for wrong in wrongs:
            with pytest.raises(ValueError, match=f"{name} must be"):
                engine.linear(**{**good, name: wrong})
    with pytest.raises(EngineError, match="rows and columns, not 0 and 4"):
        engine.linear(torch.ones(0, 4), good["x"])
    with pytest.raises(EngineError, match="rows and columns, not 6 and 0"):
        engine.linear(torch.ones(6, 0), torch.ones(2, 0))
    assert torch.equal(engine.linear(**good), torch.full((2, 6), 5.0))


def test_a_closed_engine_refuses() -> None:
    engine = CpuExperts(1)
    engine.close()
    with pytest.raises(EngineError, match="is closed"):
        engine.linear(torch.ones(6, 4), torch.ones(2, 4))


def test_native_arguments_are_checked() -> None:
    library, handle, number = load_library(), ctypes.c_void_p(), ctypes.c_uint64()
    assert library.gr_engine_create(1, None, -1, 0, 0, ctypes.byref(handle)) == 0
    for wrong, sentence in (
        ({"rows": -1}, "rows and columns, not -1 and 4"),
        ({"width": 2**30 + 1}, "more than 2^30"),
        ({"rows": 2**32 + 6}, "more than 2^30"),
        ({"dtype": 3}, "no weight dtype number 3"),
        ({"tokens": -1}, "must not be negative"),
        ({"x": None}, "lacks weights, input or output"),
    ):
        good = {"weight": 64, "x": 64, "y": 64, "tokens": 1, "rows": 6, "width": 4, "dtype": 2}
        linear = NativeLinear(**{**good, **wrong})
        assert library.gr_linear_submit(handle, ctypes.byref(linear), ctypes.byref(number)) == 1
        assert sentence in last_error(library)
    library.gr_engine_destroy(handle)
