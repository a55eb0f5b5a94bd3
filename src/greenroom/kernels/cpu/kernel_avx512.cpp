// AVX-512: bf16 by the dot product instruction of AVX512_BF16, fp16 and fp32 by fp32 FMA.
#define GR_LANES 16
#include <immintrin.h>

#include "dot_kernel.h"
#include "row_kernel.h"

namespace greenroom {
namespace {

struct Avx512 {
  static constexpr int32_t step = 16;
  static constexpr bool one_sum_is_slow = false;
  using Reg = __m512;
  using Acc = __m512;

  static Acc zero() { return _mm512_setzero_ps(); }
  static Reg load(const float *from) { return _mm512_loadu_ps(from); }
  static Reg load(const F16 *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
  }
  static Reg load_part(const float *from, int32_t count) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
  }
  static Reg load_part(const F16 *from, int32_t count) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), from));
  }
  static Acc multiply_add(Acc acc, Reg a, Reg b) { return _mm512_fmadd_ps(a, b, acc); }
  static Acc add(Acc a, Acc b) { return _mm512_add_ps(a, b); }
  static float sum(Acc a) { return _mm512_reduce_add_ps(a); }
  static void store(float *to, const float *from, int32_t count) { memcpy(to, from, sizeof(float) * count); }
};

struct Avx512Bf16 {
  static constexpr int32_t step = 32;
  static constexpr bool one_sum_is_slow = false;
  using Reg = __m512bh;
  using Acc = __m512;

  static Acc zero() { return _mm512_setzero_ps(); }
  static Reg load(const Bf16 *from) { return (__m512bh)_mm512_loadu_si512(from); }
  static Reg load_part(const Bf16 *from, int32_t count) {
    const __mmask32 mask = static_cast<__mmask32>((uint64_t{1} << count) - 1);
    return (__m512bh)_mm512_maskz_loadu_epi16(mask, from);
  }
  static Acc multiply_add(Acc acc, Reg a, Reg b) { return _mm512_dpbf16_ps(acc, a, b); }
  static Acc add(Acc a, Acc b) { return _mm512_add_ps(a, b); }
  static float sum(Acc a) { return _mm512_reduce_add_ps(a); }
  static void store(Bf16 *to, const float *from, int32_t count) {
    for (int32_t i = 0; i < count; i += 16) {
      const int32_t part = smaller(count - i, 16);
      const __mmask16 mask = static_cast<__mmask16>((1u << part) - 1);
      const __m256bh half = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, from + i));
      _mm256_mask_storeu_epi16(to + i, mask, (__m256i)half);
    }
  }
};

}  // namespace

const Kernel avx512_kernels[2][3] = {
    {
        dot_kernel<Avx512Bf16, Bf16, Bf16, false>(),
        dot_kernel<Avx512, F16, float, false>(),
        dot_kernel<Avx512, float, float, false>(),
    },
    {
        dot_kernel<Avx512Bf16, Bf16, Bf16, true>(),
        dot_kernel<Avx512, F16, float, true>(),
        dot_kernel<Avx512, float, float, true>(),
    },
};

const RowKernel avx512_rows[3] = {row_kernel<Avx512Bf16, Bf16>(), {}, row_kernel<Avx512, float>()};

}  // namespace greenroom
