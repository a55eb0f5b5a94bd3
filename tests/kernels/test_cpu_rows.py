"""What a model does with tokens between its products, by the CPU library: against formulas, torch and float64."""

import ctypes
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from greenroom.errors import EngineError
from greenroom.experts.attention import can_attend
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.native import Isa, supported_isas
from greenroom.experts.rows import ROW_DTYPES, choose, norm, turn
from greenroom.kernels.cpu.library import NativeAttention, last_error, load_library
from tests.kernels.batches import Engines

ISAS = supported_isas()
isas = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.label)
dtypes = pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with NaNs around it, at an address of any kind: whoever reads past it gets one."""
    memory = torch.full((tensor.numel() + 133,), math.nan, dtype=tensor.dtype)
    return memory[67 : 67 + tensor.numel()].view(tensor.shape).copy_(tensor)


@isas
@dtypes
@pytest.mark.parametrize("width", [1, 7, 32, 127, 128, 2048])
def test_norms_equal_the_models(isa: Isa, dtype: torch.dtype, width: int) -> None:
    module = qwen3_moe.Qwen3MoeRMSNorm(width).to(dtype)
    torch.nn.init.normal_(module.weight)
    x = guarded((torch.randn(3, 5, width) * 10).to(dtype))
    with torch.no_grad():
        expected = module(x)
        result = norm(isa, x, guarded(module.weight), module.variance_epsilon)
    # The mean is summed in another order, which may turn one rounding over.
    torch.testing.assert_close(result, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(norm(isa, x[1:2].clone(), module.weight, module.variance_epsilon), result[1:2])
    with torch.no_grad():  # where epsilon counts
        torch.testing.assert_close(
            norm(isa, x * 1e-5, module.weight, 1e-6), module(x * 1e-5), rtol=2 * torch.finfo(dtype).eps, atol=1e-6
        )


@isas
@dtypes
@pytest.mark.parametrize(("heads", "tokens", "width"), [(1, 1, 2), (4, 1, 12), (32, 3, 128), (3, 7, 64)])
def test_rotation_equals_the_models(isa: Isa, dtype: torch.dtype, heads: int, tokens: int, width: int) -> None:
    query = guarded(torch.randn(1, heads, tokens, width).to(dtype))
    cos, sin = (guarded(torch.randn(1, tokens, width).to(dtype)) for _ in range(2))
    expected, _ = qwen3_moe.apply_rotary_pos_emb(query, query, cos, sin)
    result = turn(isa, query, cos, sin)
    if dtype is torch.bfloat16:
        assert torch.equal(result, expected)
    else:  # a product and a sum may be one operation here
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


@isas
@dtypes
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (60, 4), (1024, 32), (3, 3), (1, 1)])
@pytest.mark.parametrize("normalise", [True, False])
def test_the_choice_equals_float64(isa: Isa, dtype: torch.dtype, experts: int, top_k: int, normalise: bool) -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        logits = guarded((torch.randn(1 + seed, experts, generator=generator) * 3).to(dtype))
        weights, ids = choose(isa, logits, top_k, normalise)
        shares = logits.double().softmax(-1)
        expected = shares.topk(top_k).values
        torch.testing.assert_close(shares.gather(1, ids), expected, rtol=1e-12, atol=0)
        assert all(len(set(row)) == top_k for row in ids.tolist())
        if normalise:
            expected = expected / expected.sum(-1, keepdim=True)
        torch.testing.assert_close(weights.double(), expected, rtol=2e-6, atol=1e-9)


@isas
def test_of_equal_logits_the_first_are_chosen(isa: Isa) -> None:
    _, ids = choose(isa, torch.zeros(1, 40, dtype=torch.bfloat16), 5, True)
    assert ids.tolist() == [[0, 1, 2, 3, 4]]


class Attention:
    """Random queries and a random cache, with gaps of NaN between heads and positions."""

    def __init__(
        self, heads: int, group: int, length: int, width: int, value_width: int, dtype: torch.dtype, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def cache(width: int) -> torch.Tensor:
            memory = torch.full((heads, length + 3, width + seed % 5), math.nan, dtype=dtype)
            memory[:, :length, :width] = torch.randn(heads, length, width, generator=generator)
            return memory[:, :length, :width]

        self.query = guarded(torch.randn(heads * group, width, generator=generator).to(dtype))
        self.key, self.value = cache(width), cache(value_width)
        self.scale = width**-0.5 * (1 + seed % 7)

    def check(self, out: torch.Tensor) -> None:
        group = len(self.query) // len(self.key)
        key, value = (t.double().repeat_interleave(group, dim=0) for t in (self.key, self.value))
        shares = torch.einsum("hd,hsd->hs", self.query.double(), key).mul(self.scale).softmax(-1)
        expected = torch.einsum("hs,hsd->hd", shares, value)
        size = torch.einsum("hs,hsd->hd", shares, value.abs())
        info = torch.finfo(out.dtype)
        bound = expected.abs() * info.eps / 2 + size * 2e-5 + info.smallest_normal
        error = (out.double() - expected).abs()
        assert bool((error <= bound).all()), f"error {float((error / bound).max()):.3g} of the bound"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    heads=st.integers(1, 5),
    group=st.one_of(st.integers(1, 9), st.just(32)),
    length=st.one_of(st.integers(1, 200), st.sampled_from([63, 64, 65, 128, 1000])),
    width=st.one_of(st.integers(1, 100), st.sampled_from([64, 128, 192])),
    value_width=st.sampled_from([16, 32, 48, 64, 80, 128, 512]),
    dtype=st.sampled_from(ROW_DTYPES),
    seed=st.integers(0, 2**31),
)
def test_attention_equals_float64(
    engines: Engines,
    heads: int,
    group: int,
    length: int,
    width: int,
    value_width: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    attention = Attention(heads, group, length, width, value_width, dtype, seed)
    for isa in ISAS:
        args = attention.query, attention.key, attention.value, attention.scale
        one = engines.get(1, isa).attend(*args)
        assert one.dtype == dtype
        attention.check(one)
        for threads in (2, 3):
            assert torch.equal(engines.get(threads, isa).attend(*args), one)


@isas
def test_scores_far_apart_and_late_ones(engines: Engines, isa: Isa) -> None:
    """The largest score comes first, in the middle or last, and the others vanish beside it."""
    for position in (0, 70, 199):
        attention = Attention(2, 4, 200, 64, 32, torch.float32, seed=1)
        attention.key[:, position] *= 1000
        out = engines.get(2, isa).attend(attention.query, attention.key, attention.value, attention.scale)
        attention.check(out)


def test_what_is_not_taken_is_refused(engines: Engines) -> None:
    engine = engines.get(1, Isa.AUTO)
    good = {"query": torch.ones(4, 64), "key": torch.ones(2, 5, 64), "value": torch.ones(2, 5, 32), "scale": 1.0}
    for wrong in (
        {"query": torch.ones(3, 64)},
        {"query": torch.ones(66, 64)},
        {"query": torch.ones(64, 4).T},
        {"query": torch.ones(4, 64).half()},
        {"key": torch.ones(2, 6, 64)},
        {"key": torch.ones(2, 5, 63)},
        {"key": torch.ones(2, 64, 5).transpose(1, 2)},
        {"key": torch.ones(2, 0, 64), "value": torch.ones(2, 0, 32)},
        {"value": torch.ones(2, 5, 33)},
        {"value": torch.ones(2, 5, 544)},
        {"query": torch.ones(4, 64).half(), "key": torch.ones(2, 5, 64).half(), "value": torch.ones(2, 5, 32).half()},
    ):
        with pytest.raises(ValueError, match="does not attend with"):
            engine.attend(**{**good, **wrong})
    assert can_attend(good["query"], good["key"], good["value"])
    torch.testing.assert_close(engine.attend(**good), torch.ones(4, 32))
    with CpuExperts(1) as other:
        other.close()
        with pytest.raises(EngineError, match="is closed"):
            other.attend(**good)


def test_native_arguments_are_checked() -> None:
    library, handle, number = load_library(), ctypes.c_void_p(), ctypes.c_uint64()
    assert library.gr_engine_create(1, None, -1, 0, 0, ctypes.byref(handle)) == 0
    good = {"q": 64, "k": 64, "v": 64, "out": 64, "length": 1, "heads": 2, "key_heads": 1, "width": 4}
    good |= {"value_width": 32, "dtype": 2}
    for wrong, sentence in (
        ({"length": 0}, "1 to 2^30 positions, not 0"),
        ({"heads": 33}, "1 to 32 query heads a key head, not 33 over 1"),
        ({"heads": 3, "key_heads": 2}, "not 3 over 2"),
        ({"key_heads": 0}, "not 2 over 0"),
        ({"width": 0}, "positive width, not 0"),
        ({"value_width": 40}, "a multiple of 16 wide and at most 512, not 40"),
        ({"value_width": 544}, "not 544"),
        ({"dtype": 1}, "in bf16 and fp32 only"),
        ({"dtype": 3}, "no weight dtype number 3"),
        ({"v": None}, "lacks queries, keys, values or output"),
    ):
        attention = NativeAttention(**{**good, **wrong})
        assert library.gr_attention_submit(handle, ctypes.byref(attention), ctypes.byref(number)) == 1
        assert sentence in last_error(library)
    library.gr_engine_destroy(handle)
