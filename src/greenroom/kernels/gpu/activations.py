"""The activations of ``greenroom.experts.formats.ActivationKind`` as Triton functions, in float32."""

import triton
import triton.language as tl

# ActivationKind's numbers.
_SILU = tl.constexpr(0)
_GELU = tl.constexpr(1)
_GELU_TANH = tl.constexpr(2)
_RELU2 = tl.constexpr(3)
_SWIGLU_OAI = tl.constexpr(4)


@triton.jit
def nonlinearity(x, alpha, KIND: tl.constexpr):
    """``a(x)``; ``alpha`` is read by SWIGLU_OAI alone."""
    if KIND == _SILU:
        return x * tl.sigmoid(x)
    elif KIND == _GELU:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == _GELU_TANH:
        # 0.5 x (1 + tanh(z)) = x sigmoid(2z)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == _RELU2:
        positive = tl.maximum(x, 0.0)
        return positive * positive
    else:
        tl.static_assert(KIND == _SWIGLU_OAI)
        return x * tl.sigmoid(alpha * x)


@triton.jit
def gated(gate, up, alpha, limit, KIND: tl.constexpr, CLAMPED: tl.constexpr):
    """``a(gate) * up``, clamped first if there is a limit; SWIGLU_OAI multiplies by ``up + 1``."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    if KIND == _SWIGLU_OAI:
        up += 1.0
    return nonlinearity(gate, alpha, KIND) * up


@triton.jit
def ungated(x, alpha, limit, KIND: tl.constexpr, CLAMPED: tl.constexpr):
    """``a(x)``, clamped from above first if there is a limit."""
    if CLAMPED:
        x = tl.minimum(x, limit)
    return nonlinearity(x, alpha, KIND)
