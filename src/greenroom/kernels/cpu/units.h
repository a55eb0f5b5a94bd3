// How rows are divided into units of work.
#ifndef GREENROOM_UNITS_H
#define GREENROOM_UNITS_H

#include <stdint.h>

#include <algorithm>

namespace greenroom {

// Rows of the next unit: a share of what is left, in multiples of `step`.
inline int64_t unit_rows(int64_t left, int64_t shares, int64_t step) {
  return std::max(left / shares / step * step, step);
}

}  // namespace greenroom
#endif
