"""The native CPU engine against a float64 model of the expert, on every instruction set of this machine."""

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.errors import ConfigError, EngineError
from greenroom.experts.cpu import CpuExperts, Isa, supported_isas
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from tests.kernels.reference import Experts, activate, expert_outputs

ISAS = supported_isas()
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SILU = Activation(ActivationKind.SILU)


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The model is made of tiny operations; torch's own threads would only be in the engine's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Batch:
    """Random experts, tokens and routing, with sentinels and repeated experts in it."""

    def __init__(self, format: ExpertFormat, experts: int, topk: int, tokens: int, seed: int, offset: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.format = format
        self.experts = Experts(format, experts, generator, offset)
        self.hidden = torch.randn(tokens, format.hidden, generator=generator).to(format.dtype)
        self.ids = torch.randint(-1, experts + 2, (tokens, topk), generator=generator, dtype=torch.int32)
        self.weights = torch.rand(tokens, topk, generator=generator) + 0.1

    def run(self, engine: CpuExperts) -> torch.Tensor:
        """The engine's output, written over NaN."""
        out = torch.full((self.hidden.shape[0], self.format.hidden), math.nan)
        engine.run(self.format, self.experts.addresses, self.hidden, self.ids, self.weights, out)
        return out

    def check(self, out: torch.Tensor, isa: Isa) -> None:
        """Fails if ``out`` is further from the float64 model than rounding explains."""
        reference, size = expert_outputs(self.experts, self.hidden, self.ids, self.weights)
        # These two round activations to bf16, 2^-9 of each; the others keep fp32 throughout.
        rounded = self.format.dtype is torch.bfloat16 and isa >= Isa.AVX512_BF16
        error = (out.double() - reference).abs()
        bound = size * (2**-8 if rounded else 1e-5) + 1e-30
        assert bool((error <= bound).all()), f"{isa.label}: error {float((error / bound).max()):.3g} of the bound"


class Engines:
    """Engines by threads and instruction set, created when first asked for."""

    def __init__(self) -> None:
        self._engines: dict[tuple[int, Isa], CpuExperts] = {}

    def get(self, threads: int, isa: Isa) -> CpuExperts:
        key = (threads, isa)
        if key not in self._engines:
            self._engines[key] = CpuExperts(threads, isa=isa)
        return self._engines[key]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    made.close()


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


def test_errors_reach_the_caller(engines: Engines) -> None:
    engine = engines.get(2, Isa.AUTO)
    batch = Batch(ExpertFormat(16, 8, torch.float32, SILU), 2, 1, 4, seed=0)
    batch.ids.fill_(1)
    args = (batch.hidden, batch.ids, batch.weights, torch.empty(4, 16))
    ungated = ExpertFormat(16, 8, torch.float32, Activation(ActivationKind.SWIGLU_OAI), gated=False)
    with pytest.raises(EngineError, match="needs experts with a gate"):
        engine.run(ungated, batch.experts.addresses, *args)
    with pytest.raises(EngineError, match="clamp"):
        engine.run(
            ExpertFormat(16, 8, torch.float32, Activation(ActivationKind.SILU, limit=-1.0)),
            batch.experts.addresses,
            *args,
        )
    with pytest.raises(EngineError, match="expert 1 was chosen but has no block"):
        engine.run(batch.format, np.zeros(2, dtype=np.uint64), *args)
    # The engine still works, and one bad job does not touch its neighbours.
    good = [engine.submit(batch.format, batch.experts.addresses, *args) for _ in range(3)]
    bad = engine.submit(batch.format, np.zeros(2, dtype=np.uint64), *args)
    good.append(engine.submit(batch.format, batch.experts.addresses, *args))
    with pytest.raises(EngineError, match="no block"):
        bad.wait()
    for ticket in good:
        ticket.wait()
    batch.check(args[-1], engine.isa)
    with pytest.raises(EngineError, match="once"):
        good[0].wait()


_OUT_OF_MEMORY = """
import resource
import numpy as np, torch
from greenroom.experts.cpu import CpuExperts, Isa
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat

fmt = ExpertFormat(16, 65536, torch.bfloat16, Activation(ActivationKind.SILU))
memory = torch.zeros(fmt.block_bytes + 64, dtype=torch.uint8)
address = np.array([-(-memory.data_ptr() // 64) * 64], dtype=np.uint64)

def run(engine, choices):
    hidden, ids = torch.ones(64, 16, dtype=torch.bfloat16), torch.zeros(64, choices, dtype=torch.int32)
    engine.run(fmt, address, hidden, ids, torch.ones(64, choices), torch.empty(64, 16))

with CpuExperts(2, None, Isa.AUTO) as engine:
    run(engine, 1)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
    try:
        run(engine, 1000)  # 8 GiB of activation rows
    except Exception as error:
        print(type(error).__name__, error)
    run(engine, 1)
    print("still runs")
"""


def test_no_memory_for_a_batch_is_an_error_and_no_end() -> None:
    """In a process whose memory is limited: how much another may take depends on the machine."""
    done = subprocess.run([sys.executable, "-c", _OUT_OF_MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "EngineError the CPU engine could not get memory" in done.stdout
    assert "still runs" in done.stdout


def test_wrong_tensors_are_refused(engines: Engines) -> None:
    engine = engines.get(1, Isa.AUTO)
    batch = Batch(ExpertFormat(16, 8, torch.float32, SILU), 2, 1, 4, seed=0)
    good = {
        "format": batch.format,
        "experts": batch.experts.addresses,
        "hidden": batch.hidden,
        "ids": batch.ids,
        "weights": batch.weights,
        "out": torch.empty(4, 16),
    }
    for name, wrong in {
        "hidden": batch.hidden.half(),
        "ids": batch.ids.long(),
        "weights": torch.rand(4, 2),
        "out": torch.empty(16, 4).T,
        "experts": batch.experts.addresses.astype(np.int64),
    }.items():
        with pytest.raises(ValueError, match=name):
            engine.run(**{**good, name: wrong})


def test_engine_arguments() -> None:
    with pytest.raises(EngineError, match="at least one thread"):
        CpuExperts(0)
    with pytest.raises(ConfigError, match="core numbers"):
        CpuExperts(2, cores=[0])
    before = threads_of_engines()
    for core in (-1, 1023, 1 << 20):
        with pytest.raises(EngineError, match=f"pinned to core {core}"):
            CpuExperts(1, cores=[core])
    assert threads_of_engines() == before
    with pytest.raises(ConfigError, match="portable"):
        Isa.parse("sse")
    assert Isa.parse("auto") is Isa.AUTO
    for isa in ISAS:
        assert Isa.parse(isa.label) is isa
        with CpuExperts(1, isa=isa) as engine:
            assert (engine.threads, engine.isa) == (1, isa)


def test_isa_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREENROOM_ISA", "portable")
    with CpuExperts(1) as engine:
        assert engine.isa is Isa.PORTABLE
    monkeypatch.setenv("GREENROOM_ISA", "mmx")
    with pytest.raises(ConfigError, match="mmx"):
        CpuExperts(1)
    monkeypatch.delenv("GREENROOM_ISA")
    with CpuExperts(1) as engine:
        assert engine.isa is ISAS[-1]


def test_pinned_threads_run_where_they_were_put() -> None:
    core = max(os.sched_getaffinity(0))
    before = engine_tasks()
    with CpuExperts(2, cores=[core, core]) as engine:
        masks = [os.sched_getaffinity(int(task.name)) for task in engine_tasks() if task not in before]
        assert masks == [{core}, {core}]
        batch = Batch(ExpertFormat(33, 17, torch.bfloat16, SILU), 2, 2, 20, seed=0)
        batch.check(batch.run(engine), engine.isa)


def test_jobs_from_many_threads() -> None:
    """Every job gets its own result, however they interleave."""
    failures: list[BaseException] = []
    with CpuExperts(3) as engine:
        batches = [Batch(ExpertFormat(40 + i, 24, torch.bfloat16, SILU), 5, 2, 3 + 7 * i, seed=i) for i in range(4)]
        expected = [batch.run(engine) for batch in batches]

        def client(i: int) -> None:
            try:
                batch = batches[i]
                for _ in range(40):
                    outs = [torch.full_like(expected[i], math.nan) for _ in range(4)]
                    tickets = [
                        engine.submit(
                            batch.format, batch.experts.addresses, batch.hidden, batch.ids, batch.weights, out
                        )
                        for out in outs
                    ]
                    for ticket, out in zip(reversed(tickets), reversed(outs), strict=True):
                        ticket.wait()
                        assert torch.equal(out, expected[i])
            except BaseException as error:  # reported by the test's own thread
                failures.append(error)

        clients = [threading.Thread(target=client, args=(i,)) for i in range(4)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(60)
        assert not any(thread.is_alive() for thread in clients), "a wake-up was lost"
    assert not failures, failures[0]


def test_close_finishes_submitted_jobs() -> None:
    batch = Batch(ExpertFormat(256, 128, torch.bfloat16, SILU), 8, 4, 64, seed=0)
    engine = CpuExperts(3)
    expected = batch.run(engine)
    outs = [torch.full_like(expected, math.nan) for _ in range(20)]
    args = (batch.format, batch.experts.addresses, batch.hidden, batch.ids, batch.weights)
    tickets = [engine.submit(*args, out) for out in outs]
    engine.close()
    assert all(torch.equal(out, expected) for out in outs)
    tickets[3].wait()
    with pytest.raises(EngineError, match="once"):
        tickets[3].wait()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.submit(*args, outs[0])


def engine_tasks() -> list[Path]:
    """Directories of this process's engine threads."""
    tasks = Path("/proc/self/task").iterdir()
    return [task for task in tasks if (task / "comm").read_text().strip() == "greenroom-cpu"]


def threads_of_engines() -> int:
    return len(engine_tasks())


def test_no_thread_survives_its_engine() -> None:
    before = threads_of_engines()
    batch = Batch(ExpertFormat(33, 17, torch.float32, SILU), 2, 1, 2, seed=0)
    for i in range(60):
        engine = CpuExperts(3)
        if i % 3 == 1:
            batch.run(engine)
        if i % 3 == 2:  # closed while its workers are busy
            out = torch.empty(2, 33)
            engine.submit(batch.format, batch.experts.addresses, batch.hidden, batch.ids, batch.weights, out)
        assert threads_of_engines() == before + 3
        engine.close()
        assert threads_of_engines() == before


def test_idle_workers_use_no_processor_time() -> None:
    with CpuExperts(3) as engine:
        batch = Batch(ExpertFormat(33, 17, torch.float32, SILU), 2, 1, 2, seed=0)
        batch.run(engine)
        time.sleep(0.1)  # workers spin for a moment after a job
        start = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - start < 0.05


@pytest.mark.parametrize("threads", [1, 2])
def test_no_wake_up_is_lost(threads: int) -> None:
    """Jobs that arrive while workers fall asleep, which they do 200 us after the last one."""
    done = threading.Event()

    def client() -> None:
        with CpuExperts(threads) as engine:
            batch = Batch(ExpertFormat(33, 17, torch.bfloat16, SILU), 2, 1, 2, seed=0)
            expected = batch.run(engine)
            for i in range(4000):
                submit_at = time.perf_counter() + 185e-6 + (i % 400) * 1e-7
                while time.perf_counter() < submit_at:
                    pass
                assert torch.equal(batch.run(engine), expected)
        done.set()

    thread = threading.Thread(target=client, daemon=True)
    thread.start()
    thread.join(30)
    assert done.is_set(), "a job did not end"
