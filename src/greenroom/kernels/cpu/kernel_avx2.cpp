// AVX2 with FMA and F16C: every weight is widened to fp32.
#define GR_LANES 8
#include <immintrin.h>

#include "dot_kernel.h"
#include "row_kernel.h"

namespace greenroom {
namespace {

struct Avx2 {
  static constexpr int32_t step = 8;
  static constexpr bool one_sum_is_slow = true;
  using Reg = __m256;
  using Acc = __m256;

  static Acc zero() { return _mm256_setzero_ps(); }
  static Reg load(const float *from) { return _mm256_loadu_ps(from); }
  static Reg load(const F16 *from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
  }
  static Reg load(const Bf16 *from) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  template <class T>
  static Reg load_part(const T *from, int32_t count) {
    T copy[step] = {};
    memcpy(copy, from, sizeof(T) * count);
    return load(copy);
  }
  static Acc multiply_add(Acc acc, Reg a, Reg b) { return _mm256_fmadd_ps(a, b, acc); }
  static Acc add(Acc a, Acc b) { return _mm256_add_ps(a, b); }
  static float sum(Acc a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
  static void store(float *to, const float *from, int32_t count) { memcpy(to, from, sizeof(float) * count); }
};

}  // namespace

const Kernel avx2_kernels[2][3] = {
    {
        dot_kernel<Avx2, Bf16, float, false>(),
        dot_kernel<Avx2, F16, float, false>(),
        dot_kernel<Avx2, float, float, false>(),
    },
    {
        dot_kernel<Avx2, Bf16, float, true>(),
        dot_kernel<Avx2, F16, float, true>(),
        dot_kernel<Avx2, float, float, true>(),
    },
};

const RowKernel avx2_rows[3] = {row_kernel<Avx2, Bf16>(), {}, row_kernel<Avx2, float>()};

}  // namespace greenroom
