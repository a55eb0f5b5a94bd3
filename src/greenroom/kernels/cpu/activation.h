// The non-linearities, on vectors of GR_LANES floats (GCC and clang vector extensions), so that one text
// serves every instruction set. Internal linkage on purpose: see kernel.h.
//
// Errors are a few units in the last place. NaN stays NaN, +inf stays +inf, and -inf gives what the
// formula gives in IEEE arithmetic (NaN for SiLU and GELU, as in torch; 0 for squared ReLU).
#ifndef GREENROOM_ACTIVATION_H
#define GREENROOM_ACTIVATION_H

#include "greenroom_cpu.h"

namespace greenroom {
namespace {

typedef float VecF __attribute__((vector_size(4 * GR_LANES), aligned(4), may_alias));
typedef int32_t VecI __attribute__((vector_size(4 * GR_LANES)));

inline VecF splat(float value) { return VecF{} + value; }

// exp with overflow to inf, underflow to 0 below the smallest normal number.
inline VecF exp_vec(VecF x) {
  const VecF high = splat(88.722839f), low = splat(-87.336544f);
  VecF clamped = x > high ? high : x;  // comparisons with NaN are false: NaN passes through
  clamped = clamped < low ? low : clamped;
  const VecF magic = splat(12582912.0f);  // 1.5 * 2^23: adding and subtracting it rounds to an integer
  const VecF n = (clamped * 1.44269504088896341f + magic) - magic;
  VecF r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  VecF p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // Two factors, because 2^128 itself is not a float.
  const VecI e = __builtin_convertvector(n, VecI);
  const VecI half = e >> 1;
  const VecI a = (half + 127) << 23, b = (e - half + 127) << 23;
  VecF y = p * (VecF)a * (VecF)b;
  y = x > high ? splat(__builtin_inff()) : y;
  return x < low ? splat(0.0f) : y;
}

inline VecF silu_vec(VecF x) { return x / (1.0f + exp_vec(-x)); }

// x * Phi(x); the complementary error function by a Chebyshev fit with relative error 1.2e-7.
inline VecF gelu_vec(VecF x) {
  const VecF zero = splat(0.0f);
  const VecF z = (x < zero ? -x : x) * 0.70710678118654752f;
  const VecF t = 1.0f / (1.0f + 0.5f * z);
  VecF p = splat(0.17087277f);
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  const VecF half_erfc = 0.5f * t * exp_vec(p - z * z);
  return x * (x < zero ? half_erfc : 1.0f - half_erfc);
}

inline VecF gelu_tanh_vec(VecF x) {
  // 0.5 x (1 + tanh u) = x / (1 + exp(-2u))
  const VecF u = x * (1.0f + 0.044715f * x * x);
  return x / (1.0f + exp_vec(u * -1.5957691216057308f));
}

inline VecF relu2_vec(VecF x) {
  const VecF zero = splat(0.0f);
  const VecF y = x < zero ? zero : x;
  return y * y;
}

inline VecF plain_activation(int32_t kind, VecF x) {
  switch (kind) {
    case GR_SILU: return silu_vec(x);
    case GR_GELU: return gelu_vec(x);
    case GR_GELU_TANH: return gelu_tanh_vec(x);
    default: return relu2_vec(x);
  }
}

inline VecF activate_gated(const gr_format &f, VecF gate, VecF up) {
  const VecF limit = splat(f.limit);
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up;
  up = up < -limit ? -limit : up;
  if (f.activation == GR_SWIGLU_OAI) return gate / (1.0f + exp_vec(gate * -f.alpha)) * (up + 1.0f);
  return plain_activation(f.activation, gate) * up;
}

inline VecF activate_plain(const gr_format &f, VecF up) {
  const VecF limit = splat(f.limit);
  up = up > limit ? limit : up;
  up = up < -limit ? -limit : up;
  return plain_activation(f.activation, up);
}

}  // namespace
}  // namespace greenroom
#endif
