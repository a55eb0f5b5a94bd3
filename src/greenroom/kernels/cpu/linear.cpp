#include "linear.h"

#include <algorithm>
#include <string>

#include "refuse.h"
#include "units.h"

namespace greenroom {
namespace {

constexpr int64_t kLinearShare = 4;  // a unit is what is left / (4 * threads)

const gr_linear &checked(const gr_linear &linear) {
  if (linear.rows < 1 || linear.width < 1)
    refuse("a matrix must have rows and columns, not " + std::to_string(linear.rows) + " and " +
           std::to_string(linear.width));
  if (linear.rows > kMaxSize || linear.width > kMaxSize)
    refuse("matrices with more than 2^30 rows or columns are not supported");
  check_dtype(linear.dtype);
  if (linear.tokens < 0) refuse("the count of tokens must not be negative");
  if (linear.tokens > 0 && (!linear.weight || !linear.x || !linear.y))
    refuse("the product lacks weights, input or output");
  return linear;
}

// Whole cache lines of the output, which two threads would otherwise take from each other, if enough units are left.
int64_t step_rows(const gr_linear &linear, const Kernel &kernel, int64_t threads) {
  const int64_t line = linear.dtype == GR_F32 ? 16 : 32;
  return linear.rows >= line * kLinearShare * threads ? line : kernel.up_unit;
}

}  // namespace

Linear::Linear(const gr_linear &linear, gr_isa isa, uint32_t threads)
    : linear_(checked(linear)), kernel_(&choose_linear_kernel(isa, linear.dtype)) {
  const int64_t step = step_rows(linear, *kernel_, threads);
  for (int64_t row = 0; row < linear.rows;) {
    const int64_t left = linear.rows - row;
    row += std::min(unit_rows(left, kLinearShare * threads, step), left);
    ends_.push_back(static_cast<int32_t>(row));
  }
}

void Linear::run(uint32_t unit) const { kernel_->linear(&linear_, unit ? ends_[unit - 1] : 0, ends_[unit]); }

uint32_t Linears::units() const {
  uint32_t sum = 0;
  for (const Linear &part : parts_) sum += part.units();
  return sum;
}

void Linears::run(uint32_t unit) const {
  for (const Linear &part : parts_) {
    if (unit < part.units()) return part.run(unit);
    unit -= part.units();
  }
}

}  // namespace greenroom
