// What a model does with one token between its large products: norm, rotation, routing, attention over its past.
//
// A file includes this behind dot_kernel.h, and instantiates row_kernel<Machine, Element>. Everything has internal linkage
// on purpose: see kernel.h. A row's result depends on that row alone.
#ifndef GREENROOM_ROW_KERNEL_H
#define GREENROOM_ROW_KERNEL_H

#include <math.h>
#include <stddef.h>

#include "dot_kernel.h"

namespace greenroom {
namespace {

constexpr int32_t kPositions = kBlockRows;  // of the past, taken together

typedef uint16_t VecH __attribute__((vector_size(2 * GR_LANES), aligned(2), may_alias));
typedef uint32_t VecU __attribute__((vector_size(4 * GR_LANES)));

inline VecF widen(const float *from) { return *reinterpret_cast<const VecF *>(from); }
inline VecF widen(const Bf16 *from) {
  return (VecF)(__builtin_convertvector(*reinterpret_cast<const VecH *>(from), VecU) << 16);
}

inline float sum_lanes(VecF v) {
  float sum = 0;
  for (int i = 0; i < GR_LANES; ++i) sum += v[i];
  return sum;
}

template <class T>
void norm_rows(const void *x_rows, const void *weights, void *y_rows, int64_t rows, int32_t width, float epsilon) {
  const T *weight = static_cast<const T *>(weights);
  for (int64_t row = 0; row < rows; ++row) {
    const T *x = static_cast<const T *>(x_rows) + row * width;
    T *y = static_cast<T *>(y_rows) + row * width;
    VecF squares{};
    int32_t i = 0;
    for (; i + GR_LANES <= width; i += GR_LANES) {
      const VecF v = widen(x + i);
      squares += v * v;
    }
    float sum = sum_lanes(squares);
    for (; i < width; ++i) sum += to_float(x[i]) * to_float(x[i]);
    const float factor = 1.0f / sqrtf(sum / static_cast<float>(width) + epsilon);
    // Rounded before the weight, as models do.
    for (i = 0; i < width; ++i) y[i] = rounded<T>(to_float(rounded<T>(to_float(x[i]) * factor)) * to_float(weight[i]));
  }
}

// Rounded to T as often as a model that multiplies, multiplies and adds.
template <class T>
inline T turned(T own, T cosine, T other, T sine, float sign) {
  const T straight = rounded<T>(to_float(own) * to_float(cosine));
  const T across = rounded<T>(sign * to_float(other) * to_float(sine));
  return rounded<T>(to_float(straight) + to_float(across));
}

template <class T>
void turn_heads(const void *x_rows, const void *cosines, const void *sines, void *y_rows, int64_t heads,
                int64_t tokens, int32_t width) {
  const int32_t half = width / 2;
  for (int64_t row = 0; row < heads * tokens; ++row) {
    const T *x = static_cast<const T *>(x_rows) + row * width;
    T *y = static_cast<T *>(y_rows) + row * width;
    const T *cosine = static_cast<const T *>(cosines) + row % tokens * width;
    const T *sine = static_cast<const T *>(sines) + row % tokens * width;
    for (int32_t i = 0; i < half; ++i) y[i] = turned(x[i], cosine[i], x[half + i], sine[i], -1.0f);
    for (int32_t i = half; i < width; ++i) y[i] = turned(x[i], cosine[i], x[i - half], sine[i], 1.0f);
  }
}

template <class T>
void choose_for_token(const T *logit, int32_t experts, int32_t top_k, bool normalise, float *weights, int64_t *ids) {
  float shares[kMostExperts + GR_LANES];
  float top = -INFINITY;
  for (int32_t e = 0; e < experts; ++e) {
    shares[e] = to_float(logit[e]);
    if (shares[e] > top) top = shares[e];
  }
  for (int32_t e = experts; e < experts + GR_LANES; ++e) shares[e] = -INFINITY;
  VecF sums{};
  for (int32_t e = 0; e < experts; e += GR_LANES) {
    VecF *share = reinterpret_cast<VecF *>(shares + e);
    *share = exp_vec(*share - top);
    sums += *share;
  }
  const float sum = sum_lanes(sums);
  float total = 0;
  for (int32_t k = 0; k < top_k; ++k) {
    int32_t best = 0;
    for (int32_t e = 1; e < experts; ++e)
      if (shares[e] > shares[best]) best = e;
    weights[k] = shares[best] / sum;
    total += weights[k];
    ids[k] = best;
    shares[best] = -1.0f;
  }
  for (int32_t k = 0; normalise && k < top_k; ++k) weights[k] /= total;
}

template <class T>
void choose_experts(const void *logits, int64_t tokens, int32_t experts, int32_t top_k, bool normalise, float *weights,
                    int64_t *ids) {
  for (int64_t token = 0; token < tokens; ++token)
    choose_for_token(static_cast<const T *>(logits) + token * experts, experts, top_k, normalise,
                     weights + token * top_k, ids + token * top_k);
}

// sums[n * value_width + i] += sum over positions of shares[n * kPositions + p] * v[p, i], for N heads of the query and V
// vectors of columns.
template <int N, int V, class T>
inline void add_columns(const T *v, int64_t pitch, int32_t positions, const float *shares, float *sums,
                        int32_t value_width) {
  VecF acc[N][V];
  for (int n = 0; n < N; ++n)
    for (int c = 0; c < V; ++c) acc[n][c] = widen(sums + n * value_width + c * GR_LANES);
  for (int32_t p = 0; p < positions; ++p) {
    VecF value[V];
#pragma GCC unroll 4
    for (int c = 0; c < V; ++c) value[c] = widen(v + p * pitch + c * GR_LANES);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const VecF share = splat(shares[n * kPositions + p]);
#pragma GCC unroll 4
      for (int c = 0; c < V; ++c) acc[n][c] += share * value[c];
    }
  }
  for (int n = 0; n < N; ++n)
    for (int c = 0; c < V; ++c) *reinterpret_cast<VecF *>(sums + n * value_width + c * GR_LANES) = acc[n][c];
}

template <int N, class T>
inline void add_values(const T *v, int64_t pitch, int32_t positions, const float *shares, float *sums,
                       int32_t value_width) {
  int32_t i = 0;
  for (; i + 2 * GR_LANES <= value_width; i += 2 * GR_LANES)
    add_columns<N, 2>(v + i, pitch, positions, shares, sums + i, value_width);
  for (; i < value_width; i += GR_LANES)
    add_columns<N, 1>(v + i, pitch, positions, shares, sums + i, value_width);
}

// Scores of some positions become their shares beside `top`, the largest score so far. Returns the sum of them; what was
// added up before counts `*rescale` times as much from here on.
inline float take_shares(float *scores, int32_t positions, float scale, float *top, float *rescale) {
  float most = *top;
  for (int32_t p = 0; p < positions; ++p) {
    scores[p] *= scale;
    if (scores[p] > most) most = scores[p];
  }
  for (int32_t p = positions; p % GR_LANES; ++p) scores[p] = -INFINITY;
  VecF sums{};
  for (int32_t p = 0; p < positions; p += GR_LANES) {
    VecF *share = reinterpret_cast<VecF *>(scores + p);
    *share = exp_vec(*share - most);
    sums += *share;
  }
  *rescale = expf(*top - most);
  *top = most;
  return sum_lanes(sums);
}

template <class M, class T>
void attend(const gr_attention *attention, int32_t key_head) {
  const gr_attention &a = *attention;
  const int32_t group = a.heads / a.key_heads, width = a.width, value_width = a.value_width;
  const T *k = static_cast<const T *>(a.k) + key_head * a.k_head, *v = static_cast<const T *>(a.v) + key_head * a.v_head;
  alignas(64) float scores[kMostGroup * kPositions];
  alignas(64) float sums[kMostGroup * kMostValueWidth];
  float tops[kMostGroup], totals[kMostGroup];
  const T *x[kMostGroup];
  for (int32_t n = 0; n < group; ++n) {
    x[n] = static_cast<const T *>(a.q) + (int64_t{key_head} * group + n) * width;
    tops[n] = -INFINITY;
    totals[n] = 0;
  }
  memset(sums, 0, sizeof(float) * static_cast<size_t>(group) * static_cast<size_t>(value_width));
  for (int64_t begin = 0; begin < a.length; begin += kPositions) {
    const int32_t positions = a.length - begin < kPositions ? static_cast<int32_t>(a.length - begin) : kPositions;
    dot_rows<M, true>(k + begin * a.k_position, a.k_position, positions, x, group, width, scores, kPositions, nullptr);
    for (int32_t n = 0; n < group; ++n) {
      float rescale;
      const float more = take_shares(scores + n * kPositions, positions, a.scale, &tops[n], &rescale);
      totals[n] = totals[n] * rescale + more;
      if (rescale != 1.0f)
        for (int32_t i = 0; i < value_width; ++i) sums[n * value_width + i] *= rescale;
    }
    int32_t n = 0;
    const T *values = v + begin * a.v_position;
    for (; n + 4 <= group; n += 4)
      add_values<4>(values, a.v_position, positions, scores + n * kPositions, sums + n * value_width, value_width);
    for (; n < group; ++n)
      add_values<1>(values, a.v_position, positions, scores + n * kPositions, sums + n * value_width, value_width);
  }
  T *out = static_cast<T *>(a.out) + int64_t{key_head} * group * value_width;
  for (int32_t n = 0; n < group; ++n) {
    const float factor = 1.0f / totals[n];
    for (int32_t i = 0; i < value_width; ++i) out[n * value_width + i] = rounded<T>(sums[n * value_width + i] * factor);
  }
}

template <class M, class T>
constexpr RowKernel row_kernel() {
  return RowKernel{norm_rows<T>, turn_heads<T>, choose_experts<T>, attend<M, T>};
}

}  // namespace
}  // namespace greenroom
#endif
