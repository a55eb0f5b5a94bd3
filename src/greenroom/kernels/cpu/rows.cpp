#include "rows.h"

#include <string.h>

#include <string>
#include <utility>

#include "numbers.h"
#include "refuse.h"

namespace greenroom {
namespace {

void choose(const gr_row &row, const RowKernel &kernel) {
  int64_t ids[kMostChoices];
  float *weights = static_cast<float *>(row.out);
  kernel.choose(row.x, 1, row.width, static_cast<int32_t>(row.rows), row.normalise != 0, weights, ids);
  for (int64_t k = 0; k < row.rows; ++k) {
    row.ids[k] = static_cast<int32_t>(ids[k]);
    if (row.weights_dtype == GR_BF16) weights[k] = to_float(rounded<Bf16>(weights[k]));
  }
}

void store(const gr_row &row) {
  const size_t size = row.dtype == GR_F32 ? 4 : 2, bytes = size * static_cast<size_t>(row.width);
  for (int64_t i = 0; i < row.rows; ++i)
    memcpy(static_cast<uint8_t *>(row.out) + static_cast<size_t>(i * row.pitch) * size,
           static_cast<const uint8_t *>(row.x) + static_cast<size_t>(i) * bytes, bytes);
}

template <class T>
void add(const gr_row &row) {
  const T *x = static_cast<const T *>(row.x), *y = static_cast<const T *>(row.y);
  T *out = static_cast<T *>(row.out);
  for (int64_t i = 0; i < row.rows * row.width; ++i) out[i] = rounded<T>(to_float(x[i]) + to_float(y[i]));
}

void run_row(const gr_row &row, const RowKernel &kernel) {
  switch (row.kind) {
    case GR_ROW_NORM: return kernel.norm(row.x, row.y, row.out, row.rows, row.width, row.epsilon);
    case GR_ROW_TURN: return kernel.turn(row.x, row.y, row.z, row.out, row.rows, 1, row.width);
    case GR_ROW_CHOOSE: return choose(row, kernel);
    case GR_ROW_STORE: return store(row);
    default: return row.dtype == GR_F32 ? add<float>(row) : add<Bf16>(row);
  }
}

}  // namespace

Rows::Rows(std::vector<gr_row> rows, gr_isa isa) : rows_(std::move(rows)) {
  for (const gr_row &row : rows_) {
    if (row.kind < GR_ROW_NORM || row.kind > GR_ROW_ADD) refuse("there are no rows of kind " + std::to_string(row.kind));
    const RowKernel *kernel = row.dtype == GR_F16 ? nullptr : choose_row_kernel(isa, row.dtype);
    if (!kernel) refuse("what lies between products is computed in bf16 and fp32 only");
    if (row.kind == GR_ROW_CHOOSE && (row.rows > kMostChoices || row.width > kMostExperts))
      refuse("a router may have " + std::to_string(kMostExperts) + " experts and " + std::to_string(kMostChoices) +
             " choices at most");
    kernels_.push_back(kernel);
  }
}

void Rows::run() const {
  for (size_t i = 0; i < rows_.size(); ++i) run_row(rows_[i], *kernels_[i]);
}

}  // namespace greenroom
