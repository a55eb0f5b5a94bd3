// Products of a few rows with a dense matrix, divided into units of work that threads can take in any order.
#ifndef GREENROOM_LINEAR_H
#define GREENROOM_LINEAR_H

#include <utility>
#include <vector>

#include "isa.h"

namespace greenroom {

class Linear {
 public:
  // Throws std::invalid_argument with a sentence if the product makes no sense, and std::bad_alloc.
  // threads: how many will share the work; decides the sizes of units, never a result.
  Linear(const gr_linear &linear, gr_isa isa, uint32_t threads);

  uint32_t units() const { return static_cast<uint32_t>(ends_.size()); }  // at least 1

  void run(uint32_t unit) const;

 private:
  gr_linear linear_;
  const Kernel *kernel_;
  std::vector<int32_t> ends_;  // of each unit's rows, which begin where those of the unit before end
};

// Products that do not depend on each other.
class Linears {
 public:
  Linears() = default;
  explicit Linears(std::vector<Linear> parts) : parts_(std::move(parts)) {}

  uint32_t units() const;  // 0 without any

  void run(uint32_t unit) const;

 private:
  std::vector<Linear> parts_;
};

}  // namespace greenroom
#endif
