// A job, or a slice of its tokens, divided into units of work that threads can take in any order.
#ifndef GREENROOM_PLAN_H
#define GREENROOM_PLAN_H

#include <vector>

#include "isa.h"
#include "memory.h"

namespace greenroom {

// Throws std::invalid_argument with a sentence if the job makes no sense.
void check_job(const gr_job &job);

// How many tokens one plan may take, so that activation rows stay within a fixed amount of memory.
int64_t slice_tokens(const gr_job &job);

// Built by one thread, then read by all. Up units write activation rows of their own; down units own
// columns of the output and add the experts in ascending order. Units of one kind are independent of
// each other; every up unit must be finished before the first down unit.
class Plan {
 public:
  // Groups the pairs of tokens [first, first + count) by expert. Throws std::invalid_argument for a chosen
  // expert without a block or divided at an impossible row, and std::bad_alloc. Memory of earlier plans is reused.
  // threads: how many will share the work; decides the sizes of units, never a result.
  void build(const gr_job &job, int64_t first, int64_t count, const KernelChoice &kernels, uint32_t threads);

  uint32_t up_units() const { return static_cast<uint32_t>(up_units_.size()); }
  uint32_t down_units() const { return static_cast<uint32_t>(down_units_.size()); }
  size_t scratch_bytes() const { return scratch_bytes_; }

  void run_up(uint32_t unit, void *scratch) const;
  void run_down(uint32_t unit, void *scratch) const;

 private:
  struct UpUnit {
    uint32_t group;
    int32_t first, last;  // rows of `inter`
  };
  struct DownUnit {
    int32_t first, last;  // columns of the output
  };

  void read_divided(const gr_job &job);
  void divide(uint32_t threads);

  gr_format format_{};
  float *out_ = nullptr;
  int64_t tokens_ = 0;
  std::vector<int32_t> begins_;          // [experts + 1] first pair of each expert
  int32_t divided_ = -1;                 // expert, or -1
  int32_t divided_begin_ = 0;            // its first row here
  std::vector<Pair> pairs_;              // by expert, then token, then position in the token's list
  std::vector<Group> groups_;            // ascending experts, only those with pairs
  std::vector<const Kernel *> kernels_;  // of each group
  std::vector<size_t> act_offsets_;      // of each group, in act_
  std::vector<UpUnit> up_units_;
  std::vector<DownUnit> down_units_;
  GrowingBuffer act_;
  int32_t down_rows_ = 0;      // widest down unit, and the pitch of its sums in scratch
  size_t kernel_bytes_ = 0;    // scratch of the kernels, which lies before the sums
  size_t scratch_bytes_ = 0;
};

}  // namespace greenroom
#endif
