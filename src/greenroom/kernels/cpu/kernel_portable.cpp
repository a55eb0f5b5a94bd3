// Plain C++, for processors without AVX2 and for other architectures.
#define GR_LANES 4
#include "dot_kernel.h"
#include "row_kernel.h"

namespace greenroom {
namespace {

struct Plain {
  static constexpr int32_t step = 8;
  static constexpr bool one_sum_is_slow = true;
  struct Reg {
    float lane[step];
  };
  using Acc = Reg;

  static Acc zero() { return Acc{}; }
  template <class T>
  static Reg load(const T *from) {
    Reg reg;
    for (int i = 0; i < step; ++i) reg.lane[i] = to_float(from[i]);
    return reg;
  }
  template <class T>
  static Reg load_part(const T *from, int32_t count) {
    Reg reg{};
    for (int32_t i = 0; i < count; ++i) reg.lane[i] = to_float(from[i]);
    return reg;
  }
  static Acc multiply_add(Acc acc, const Reg &a, const Reg &b) {
    for (int i = 0; i < step; ++i) acc.lane[i] += a.lane[i] * b.lane[i];
    return acc;
  }
  static Acc add(Acc a, const Acc &b) {
    for (int i = 0; i < step; ++i) a.lane[i] += b.lane[i];
    return a;
  }
  static float sum(const Acc &a) {
    return ((a.lane[0] + a.lane[4]) + (a.lane[2] + a.lane[6])) + ((a.lane[1] + a.lane[5]) + (a.lane[3] + a.lane[7]));
  }
  static void store(float *to, const float *from, int32_t count) { memcpy(to, from, sizeof(float) * count); }
};

}  // namespace

const Kernel portable_kernels[2][3] = {
    {
        dot_kernel<Plain, Bf16, float, false>(),
        dot_kernel<Plain, F16, float, false>(),
        dot_kernel<Plain, float, float, false>(),
    },
    {
        dot_kernel<Plain, Bf16, float, true>(),
        dot_kernel<Plain, F16, float, true>(),
        dot_kernel<Plain, float, float, true>(),
    },
};

const RowKernel portable_rows[3] = {row_kernel<Plain, Bf16>(), {}, row_kernel<Plain, float>()};

}  // namespace greenroom
