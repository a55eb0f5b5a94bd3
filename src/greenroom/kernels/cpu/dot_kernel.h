// The kernel by dot products: weights stream once in row order, each loaded weight serves every token.
// The best choice for few tokens, and the only one without AMX.
//
// A file includes this after defining GR_LANES, and instantiates dot_kernel<Machine, Weight, Act, BatchInvariant> with
//   Machine::Reg, Acc, step      a register of `step` elements and its fp32 accumulator
//   Machine::one_sum_is_slow     whether products that wait for each other take longer than their weights' way here
//   Machine::load(const T *), load_part(const T *, count), multiply_add(Acc, Reg, Reg), sum(Acc)
//   Machine::store(Act *, const float *, count)
// Everything has internal linkage on purpose: see kernel.h.
//
// An output element is always computed by the same operations in the same order: which variant of the
// inner loop runs depends on the tokens of the expert and on the row's position within a unit only. With
// `BatchInvariant` all variants take the same order, one sum along the row.
#ifndef GREENROOM_DOT_KERNEL_H
#define GREENROOM_DOT_KERNEL_H

#include <string.h>

#include "activation.h"
#include "kernel.h"
#include "numbers.h"

namespace greenroom {
namespace {

constexpr int32_t kUnit = 8;          // rows that are not divided between threads
constexpr int32_t kBlockRows = 64;    // rows whose results wait in scratch for their activation
constexpr int32_t kBlockTokens = 32;  // tokens taken together: their inputs stay in the L2 cache
constexpr int64_t kAhead = 16384;     // distance of the software prefetch, in bytes that are read: beyond the L1 cache

// Prefetches run ahead in the order in which weights are read: to the end of a run, then into the next.
struct Stream {
  int64_t distance;  // in memory: whole rows if there are gaps between them
  const uint8_t *end;
  const uint8_t *next;  // null: nothing follows
};

inline void prefetch_ahead(const uint8_t *at, const Stream &stream) {
  const uint8_t *ahead = at + stream.distance;
  if (ahead >= stream.end) {
    if (!stream.next) return;
    ahead = stream.next + (ahead - stream.end);
  }
  __builtin_prefetch(ahead, 0, 2);
}

// c[n * ldc + r] = dot(row r, x[n]) for R rows and N tokens, each with U partial sums.
template <class M, int R, int N, int U, class W, class X>
inline void dot_block(const W *w, int64_t pitch, const X *const *x, int32_t k, float *c, int32_t ldc,
                      const Stream *stream) {
  typename M::Acc acc[R][N][U];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n)
      for (int u = 0; u < U; ++u) acc[r][n][u] = M::zero();
  int32_t p = 0;
  for (; p + M::step * U <= k; p += M::step * U) {
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) {
      const int32_t q = p + u * M::step;
      typename M::Reg xv[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) xv[n] = M::load(x[n] + q);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const W *address = w + r * pitch + q;
        if (stream) prefetch_ahead(reinterpret_cast<const uint8_t *>(address), *stream);
        const typename M::Reg wv = M::load(address);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) acc[r][n][u] = M::multiply_add(acc[r][n][u], wv, xv[n]);
      }
    }
  }
  for (; p < k; p += M::step) {
    const int32_t count = k - p < M::step ? k - p : M::step;
    for (int n = 0; n < N; ++n) {
      const typename M::Reg xv = M::load_part(x[n] + p, count);
      for (int r = 0; r < R; ++r) {
        const W *address = w + r * pitch + p;
        if (stream && n == 0) prefetch_ahead(reinterpret_cast<const uint8_t *>(address), *stream);
        acc[r][n][0] = M::multiply_add(acc[r][n][0], M::load_part(address, count), xv);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) {
      for (int u = 1; u < U; ++u) acc[r][n][0] = M::add(acc[r][n][0], acc[r][n][u]);
      c[n * ldc + r] = M::sum(acc[r][n][0]);
    }
}

// R rows and all tokens: four at a time, then the rest. Only the first pass meets cold weights.
template <class M, int R, bool BatchInvariant, class W, class X>
inline void dot_tokens(const W *w, int64_t pitch, const X *const *x, int32_t tokens, int32_t k, float *c,
                       int32_t ldc, const Stream *stream) {
  constexpr int sums = R == 1 && !BatchInvariant ? 4 : 1;
  int32_t n = 0;
  for (; n + 4 <= tokens; n += 4) {
    dot_block<M, R, 4, 1>(w, pitch, x + n, k, c + n * ldc, ldc, stream);
    stream = nullptr;
  }
  if (tokens - n == 3) dot_block<M, R, 3, 1>(w, pitch, x + n, k, c + n * ldc, ldc, stream);
  if (tokens - n == 2) dot_block<M, R, 2, sums>(w, pitch, x + n, k, c + n * ldc, ldc, stream);
  if (tokens - n == 1) dot_block<M, R, 1, sums>(w, pitch, x + n, k, c + n * ldc, ldc, stream);
}

inline int64_t prefetch_distance(int64_t row_bytes, int64_t pitch_bytes) {
  return row_bytes == pitch_bytes ? kAhead : (kAhead + row_bytes - 1) / row_bytes * pitch_bytes;
}

// c[n * ldc + r] for all rows. Few tokens: row after row, exactly the order of the bytes in memory, unless a machine
// that may keep one sum only is idle between its products.
template <class M, bool BatchInvariant, class W, class X>
inline void dot_rows(const W *w, int64_t pitch, int32_t rows, const X *const *x, int32_t tokens, int32_t k, float *c,
                     int32_t ldc, const uint8_t *next) {
  constexpr int64_t size = sizeof(W);
  const Stream stream{prefetch_distance(k * size, pitch * size), reinterpret_cast<const uint8_t *>(w + rows * pitch),
                      next};
  int32_t r = 0;
  if (tokens > 2 || (BatchInvariant && M::one_sum_is_slow))
    for (; r + 4 <= rows; r += 4)
      dot_tokens<M, 4, BatchInvariant>(w + r * pitch, pitch, x, tokens, k, c + r, ldc, &stream);
  for (; r < rows; ++r)
    dot_tokens<M, 1, BatchInvariant>(w + r * pitch, pitch, x, tokens, k, c + r, ldc, &stream);
}

inline int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

// Elements between activation rows: whole cache lines.
template <class A>
inline int64_t act_pitch(const gr_format &f) {
  constexpr int64_t line = 64 / sizeof(A);
  return (f.inter + line - 1) / line * line;
}

template <class A>
size_t dot_act_bytes(const gr_format *f, int32_t count) {
  return static_cast<size_t>(count) * act_pitch<A>(*f) * sizeof(A);
}

inline size_t dot_scratch_bytes(const gr_format *) {
  return sizeof(float) * 2 * kBlockTokens * kBlockRows;
}

template <class M, class W, class A, bool BatchInvariant>
void dot_up(const Group *group, int32_t first, int32_t last, const uint8_t *next, void *scratch) {
  const gr_format &f = *group->format;
  const W *matrix = reinterpret_cast<const W *>(group->block + f.up);
  const W *bias = f.has_bias ? reinterpret_cast<const W *>(group->block + f.up_bias) : nullptr;
  const W *hidden = reinterpret_cast<const W *>(group->hidden);
  A *act = reinterpret_cast<A *>(group->act);
  const int64_t pitch = act_pitch<A>(f);
  float *gate = static_cast<float *>(scratch);  // [kBlockTokens][kBlockRows]
  float *up = gate + kBlockTokens * kBlockRows;
  const int32_t up_row = f.gated ? f.inter : 0;
  for (int32_t row = first; row < last; row += kBlockRows) {
    const int32_t rows = smaller(last - row, kBlockRows);
    const W *gate_rows = matrix + static_cast<int64_t>(row) * f.hidden;
    const W *up_rows = matrix + static_cast<int64_t>(up_row + row) * f.hidden;
    const uint8_t *after =
        row + rows < last ? reinterpret_cast<const uint8_t *>(gate_rows + static_cast<int64_t>(rows) * f.hidden)
                          : next;
    for (int32_t token = 0; token < group->count; token += kBlockTokens) {
      const int32_t tokens = smaller(group->count - token, kBlockTokens);
      const W *x[kBlockTokens];
      for (int32_t n = 0; n < tokens; ++n)
        x[n] = hidden + static_cast<int64_t>(group->pairs[token + n].token) * f.hidden;
      if (f.gated)
        dot_rows<M, BatchInvariant>(gate_rows, f.hidden, rows, x, tokens, f.hidden, gate, kBlockRows,
                                    reinterpret_cast<const uint8_t *>(up_rows));
      dot_rows<M, BatchInvariant>(up_rows, f.hidden, rows, x, tokens, f.hidden, up, kBlockRows, after);
      for (int32_t n = 0; n < tokens; ++n) {
        float *g = gate + n * kBlockRows, *u = up + n * kBlockRows;
        if (bias)
          for (int32_t r = 0; r < rows; ++r) {
            if (f.gated) g[r] += to_float(bias[row + r]);
            u[r] += to_float(bias[up_row + row + r]);
          }
        // Whole vectors: the lanes past the last row hold old numbers, and nothing reads their results.
        for (int32_t r = 0; r < rows; r += GR_LANES) {
          VecF *uv = reinterpret_cast<VecF *>(u + r);
          *uv = f.gated ? activate_gated(f, *reinterpret_cast<VecF *>(g + r), *uv) : activate_plain(f, *uv);
        }
        M::store(act + (token + n) * pitch + row, u, rows);
      }
    }
  }
}

template <class M, class W, class A, bool BatchInvariant>
void dot_down(const Group *group, int32_t first, int32_t last, float *sums, int64_t sums_pitch,
              const uint8_t *next, void *scratch) {
  const gr_format &f = *group->format;
  const int32_t begin = group->begin;
  const W *matrix = reinterpret_cast<const W *>(group->block + f.down) + begin;
  const W *bias = f.has_bias ? reinterpret_cast<const W *>(group->block + f.down_bias) : nullptr;
  const A *act = reinterpret_cast<const A *>(group->act);
  const int64_t pitch = act_pitch<A>(f);
  float *products = static_cast<float *>(scratch);  // [kBlockTokens][kBlockRows]
  for (int32_t row = first; row < last; row += kBlockRows) {
    const int32_t rows = smaller(last - row, kBlockRows);
    const W *w = matrix + static_cast<int64_t>(row) * f.inter;
    const uint8_t *after =
        row + rows < last ? reinterpret_cast<const uint8_t *>(w + static_cast<int64_t>(rows) * f.inter) : next;
    for (int32_t token = 0; token < group->count; token += kBlockTokens) {
      const int32_t tokens = smaller(group->count - token, kBlockTokens);
      const A *x[kBlockTokens];
      for (int32_t n = 0; n < tokens; ++n) x[n] = act + (token + n) * pitch + begin;
      dot_rows<M, BatchInvariant>(w, f.inter, rows, x, tokens, f.inter - begin, products, kBlockRows, after);
      for (int32_t n = 0; n < tokens; ++n) {
        const Pair pair = group->pairs[token + n];
        float *sum = sums + pair.token * sums_pitch + (row - first);
        float *product = products + n * kBlockRows;
        if (bias)
          for (int32_t r = 0; r < rows; ++r) product[r] += to_float(bias[row + r]);
        for (int32_t r = 0; r < rows; ++r) sum[r] += pair.weight * product[r];
      }
    }
  }
}

template <class M, class W>
void dot_linear(const gr_linear *linear, int32_t first, int32_t last) {
  const int32_t width = static_cast<int32_t>(linear->width);
  const W *bias = static_cast<const W *>(linear->bias);
  float products[kBlockTokens][kBlockRows];
  for (int32_t row = first; row < last; row += kBlockRows) {
    const int32_t rows = smaller(last - row, kBlockRows);
    const W *w = static_cast<const W *>(linear->weight) + static_cast<int64_t>(row) * width;
    const W *after = row + rows < last ? w + static_cast<int64_t>(rows) * width : nullptr;
    for (int64_t token = 0; token < linear->tokens; token += kBlockTokens) {
      const int64_t left = linear->tokens - token;
      const int32_t tokens = left < kBlockTokens ? static_cast<int32_t>(left) : kBlockTokens;
      const W *x[kBlockTokens];
      for (int32_t n = 0; n < tokens; ++n) x[n] = static_cast<const W *>(linear->x) + (token + n) * width;
      dot_rows<M, true>(w, width, rows, x, tokens, width, products[0], kBlockRows,
                        reinterpret_cast<const uint8_t *>(after));
      for (int32_t n = 0; n < tokens; ++n) {
        float *product = products[n];
        if (bias)
          for (int32_t r = 0; r < rows; ++r) product[r] += to_float(bias[row + r]);
        W *y = static_cast<W *>(linear->y) + (token + n) * linear->rows + row;
        for (int32_t r = 0; r < rows; ++r) y[r] = rounded<W>(product[r]);
      }
    }
  }
}

template <class M, class W, class A, bool BatchInvariant>
constexpr Kernel dot_kernel() {
  return Kernel{kUnit,
                kUnit,
                dot_act_bytes<A>,
                dot_scratch_bytes,
                dot_up<M, W, A, BatchInvariant>,
                dot_down<M, W, A, BatchInvariant>,
                dot_linear<M, W>};
}

}  // namespace
}  // namespace greenroom
#endif
