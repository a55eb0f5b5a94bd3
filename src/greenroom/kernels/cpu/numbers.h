// Half precision as plain numbers, for every instruction set. Internal linkage on purpose: see kernel.h.
#ifndef GREENROOM_NUMBERS_H
#define GREENROOM_NUMBERS_H

#include <stdint.h>
#include <string.h>

namespace greenroom {
namespace {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

inline float to_float(float value) { return value; }
inline float to_float(Bf16 value) { return bits_to_float(static_cast<uint32_t>(value.bits) << 16); }
inline float to_float(F16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t rest = value.bits & 0x7fffu;
  if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // Rebias by multiplying, which also makes subnormal numbers exact.
  const float magnitude = bits_to_float(rest << 13) * 5.192296858534828e33f;  // 2^112
  return bits_to_float(sign) == 0.0f && sign ? -magnitude : magnitude;
}

// To the nearest, ties to even; NaN stays NaN.
template <class T>
inline T rounded(float value);

template <>
inline float rounded<float>(float value) {
  return value;
}

template <>
inline Bf16 rounded<Bf16>(float value) {
  const uint32_t bits = float_to_bits(value);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return Bf16{static_cast<uint16_t>(nan ? bits >> 16 | 0x40u : nearest)};
}

template <>
inline F16 rounded<F16>(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u)
    half = 0x7e00u;  // NaN
  else if (magnitude >= 0x477ff000u)
    half = 0x7c00u;  // from 65520: infinity
  else if (magnitude < 0x38800000u)
    // Subnormal: the last place of numbers from a half is 2^-24, and the addition rounds to it.
    half = float_to_bits(bits_to_float(magnitude) + 0.5f) - float_to_bits(0.5f);
  else
    half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  return F16{static_cast<uint16_t>(sign | half)};
}

}  // namespace
}  // namespace greenroom
#endif
