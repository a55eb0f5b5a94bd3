"""Sequences of steps: each reads what those before it wrote, all threads share each, and what fails ends them."""

import math
import threading
import time

import pytest
import torch

from greenroom.errors import EngineError
from greenroom.experts.attention import native_attention
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.linear import native_linear
from greenroom.experts.native import Isa, supported_isas
from greenroom.experts.rows import choose, norm, turn
from greenroom.experts.sequence import StepSequence, add_row, choose_row, norm_row, store_row, turn_row
from greenroom.kernels.cpu.library import NativeStep

ISAS = supported_isas()
isas = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.label)
BF16 = torch.bfloat16


def random(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(dtype)


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


def chain(width: int, length: int, weights: list[torch.Tensor]) -> tuple[StepSequence, list[torch.Tensor]]:
    """``length`` products, each of the one before. The first reads the first of the rows."""
    rows = [random(width), *(empty(width) for _ in range(length))]
    steps = [[native_linear(weights[i % len(weights)], rows[i], None, rows[i + 1])] for i in range(length)]
    return StepSequence(steps), rows


def chain_float64(width: int, length: int, weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The same, with the rounding of each product."""
    for i in range(length):
        x = (weights[i % len(weights)].double() @ x.double()).to(BF16)
    return x


@isas
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("callers_help", [False, True])
def test_a_long_chain_equals_float64(isa: Isa, threads: int, callers_help: bool) -> None:
    torch.manual_seed(0)
    weights = [random(96, 96, scale=96**-0.5) for _ in range(3)]
    with CpuExperts(threads, isa=isa, callers_help=callers_help) as engine:
        sequence, rows = chain(96, 60, weights)
        expected = chain_float64(96, 60, weights, rows[0])
        for _ in range(5):
            for row in rows[1:]:
                row.fill_(math.nan)
            engine.run_sequence(sequence, (rows, weights))
            torch.testing.assert_close(rows[-1], expected, rtol=0.3, atol=0.05)  # 60 roundings
            by_one = rows[0]
            for i in range(60):
                by_one = engine.linear(weights[i % 3], by_one)
            assert torch.equal(rows[-1], by_one)


@isas
def test_all_kinds_of_steps_equal_single_calls(isa: Isa) -> None:
    torch.manual_seed(1)
    heads, key_heads, width, length, experts = 4, 2, 32, 9, 21
    x, weight, other = random(heads * width), random(width), random(heads * width)
    first, second = random(experts, heads * width, scale=0.1), random(7, heads * width, scale=0.1)
    cosines, sines = random(width), random(width)
    keys, values = random(key_heads, length, width), random(key_heads, length, width)
    normal, turned, attended, summed = (empty(heads, width) for _ in range(4))
    logits, more, stored = empty(experts), empty(7), empty(heads, 3, width)
    weights, ids = torch.empty(4), torch.empty(4, dtype=torch.int32)
    sequence = StepSequence(
        [
            [norm_row(x, weight, 1e-6, normal), turn_row(normal, width, turned), store_row(turned, width)],
            [native_attention(turned, keys, values, 0.2, attended)],
            [add_row(attended, other, summed)],
            [native_linear(first, summed.view(-1), None, logits), native_linear(second, summed.view(-1), None, more)],
            [choose_row(logits, True, BF16, weights, ids)],
        ]
    )
    turning, store = sequence.part(0, 1), sequence.part(0, 2)
    turning.y, turning.z = cosines.data_ptr(), sines.data_ptr()
    store.out, store.pitch = stored[0, 1].data_ptr(), stored.stride(0)
    with CpuExperts(2, isa=isa) as engine:
        engine.run_sequence(sequence, ())
        expected = norm(engine.isa, x.view(heads, width), weight, 1e-6)
        assert torch.equal(normal, expected)
        expected = turn(engine.isa, expected.view(heads, 1, width), cosines.view(1, -1), sines.view(1, -1))
        assert torch.equal(turned, expected.view(heads, width))
        assert torch.equal(stored[:, 1], turned)
        assert stored[:, 0].isnan().all()
        assert stored[:, 2].isnan().all()
        assert torch.equal(attended, engine.attend(turned, keys, values, 0.2))
        assert torch.equal(summed, attended + other.view(heads, width))
        assert torch.equal(logits, engine.linear(first, summed.view(-1)))
        assert torch.equal(more, engine.linear(second, summed.view(-1)))
        shares, chosen = choose(engine.isa, logits[None], 4, True)
        assert ids.tolist() == chosen[0].tolist()
        assert torch.equal(weights, shares[0].to(BF16).float())


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_sums_are_rounded_as_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x, y, out = random(999, dtype=dtype), random(999, dtype=dtype), empty(999, dtype=dtype)
    with CpuExperts(1) as engine:
        engine.run_sequence(StepSequence([[add_row(x, y, out)]]), ())
        assert torch.equal(out, x + y)
        engine.run_sequence(StepSequence([[add_row(x, x, x)]]), ())
    assert not torch.equal(x, out)


def test_weights_of_a_router_are_left_in_fp32_if_the_model_does() -> None:
    logits, weights, ids = random(9), torch.empty(3), torch.empty(3, dtype=torch.int32)
    with CpuExperts(1) as engine:
        engine.run_sequence(StepSequence([[choose_row(logits, False, torch.float32, weights, ids)]]), ())
        shares, _ = choose(engine.isa, logits[None], 3, False)
    assert torch.equal(weights, shares[0])
    assert not torch.equal(weights, weights.to(BF16).float())


@pytest.mark.parametrize("callers_help", [False, True])
def test_sequences_and_jobs_of_several_threads_do_not_mix(callers_help: bool) -> None:
    torch.manual_seed(3)
    weights = [random(64, 64, scale=0.125) for _ in range(2)]
    chains = [chain(64, 20, weights) for _ in range(4)]
    failures: list[BaseException] = []
    with CpuExperts(2, callers_help=callers_help) as engine:
        expected = []
        for sequence, rows in chains:
            engine.run_sequence(sequence, (rows,))
            expected.append(rows[-1].clone())
        product = engine.linear(weights[0], chains[0][1][0])

        def work(number: int) -> None:
            try:
                sequence, rows = chains[number]
                for _ in range(50):
                    rows[-1].fill_(math.nan)
                    engine.run_sequence(sequence, (rows,))
                    assert torch.equal(rows[-1], expected[number])
                    assert torch.equal(engine.linear(weights[0], chains[0][1][0]), product)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_what_makes_no_sense_is_refused_before_anything_runs() -> None:
    weight, x, out = random(8, 8), random(8), empty(8)
    good = [native_linear(weight, x, None, out)]
    with CpuExperts(2) as engine:
        with pytest.raises(EngineError, match="at least one step"):
            engine.run_sequence(StepSequence([]), ())
        strange = norm_row(x, x, 1e-6, out)
        strange.kind = 9
        with pytest.raises(EngineError, match="kind 9"):
            engine.run_sequence(StepSequence([good, [strange]]), ())
        half = add_row(x, x, out)
        half.dtype = 1
        with pytest.raises(EngineError, match="bf16 and fp32 only"):
            engine.run_sequence(StepSequence([good, [half]]), ())
        wide = random(1025)
        many = choose_row(wide, True, BF16, torch.empty(2), torch.empty(2, dtype=torch.int32))
        with pytest.raises(EngineError, match="1024 experts"):
            engine.run_sequence(StepSequence([[many]]), ())
        rows = good[0]
        rows.rows = 0
        with pytest.raises(EngineError, match="rows and columns"):
            engine.run_sequence(StepSequence([good]), ())
        unknown = StepSequence([[native_linear(weight, x, None, out)]])
        unknown.native[0] = NativeStep(7, 1, unknown.native[0].what)
        with pytest.raises(EngineError, match="kind 7"):
            engine.run_sequence(unknown, ())
        unknown.native[0] = NativeStep(2, 2, unknown.native[0].what)
        with pytest.raises(EngineError, match="too much"):
            engine.run_sequence(unknown, ())
        assert out.isnan().all()
        engine.run_sequence(StepSequence([[native_linear(weight, x, None, out)]]), ())
        assert torch.equal(out, engine.linear(weight, x))


def test_an_engine_that_is_closed_meanwhile_ends_the_sequence_first() -> None:
    torch.manual_seed(4)
    weights = [random(512, 512, scale=0.04)]
    sequence, rows = chain(512, 50, weights)
    engine = CpuExperts(2)
    engine.run_sequence(sequence, (rows,))
    expected = rows[-1].clone()
    rows[-1].fill_(math.nan)
    engine.throttle(20)
    thread = threading.Thread(target=lambda: engine.run_sequence(sequence, (rows,)))
    thread.start()
    time.sleep(0.02)
    engine.throttle(1)
    engine.close()
    thread.join()
    assert torch.equal(rows[-1], expected)
    with pytest.raises(EngineError, match="closed"):
        engine.run_sequence(sequence, (rows,))
