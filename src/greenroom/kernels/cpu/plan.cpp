#include "plan.h"

#include <string.h>

#include <algorithm>
#include <string>

#include "refuse.h"
#include "units.h"

namespace greenroom {
namespace {

constexpr int64_t kSliceActBytes = int64_t{128} << 20;
constexpr int64_t kSliceTokens = 4096;
// Units shrink as the work runs out: long runs of memory first, and threads that end together.
constexpr int64_t kUpShare = 4;  // an up unit is what is left / (4 * threads)
// The same for down units. A unit of a whole share lets the slowest thread end the phase alone, so it is half a share
// where units may be narrow.
constexpr int64_t kDownShare = 2, kWideDownShare = 1;
// A down unit sums in scratch, tokens close together, and copies to the output at the end: in the output itself the
// tokens lie a power of two apart as a rule, and would push each other out of the cache.
constexpr int64_t kSumBytes = int64_t{5} << 19;
constexpr int64_t kMaxDownRows = 256;
constexpr int32_t kDivisionRows = 32;  // a divided expert starts at a multiple: the widest kernel's unit

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

}  // namespace

void check_job(const gr_job &job) {
  if (!job.format) refuse("the job has no expert format");
  const gr_format &f = *job.format;
  if (f.hidden < 1 || f.inter < 1)
    refuse("expert widths must be positive, not hidden=" + std::to_string(f.hidden) +
           " and inter=" + std::to_string(f.inter));
  if (f.hidden > kMaxSize || f.inter > kMaxSize) refuse("expert widths above 2^30 are not supported");
  check_dtype(f.dtype);
  if (f.activation < GR_SILU || f.activation > GR_SWIGLU_OAI)
    refuse("there is no activation number " + std::to_string(f.activation));
  if (f.activation == GR_SWIGLU_OAI && !f.gated) refuse("the gpt-oss activation needs experts with a gate");
  if (!(f.limit > 0)) refuse("the clamp of an activation must be positive");
  if (f.up < 0 || f.down < 0 || (f.has_bias && (f.up_bias < 0 || f.down_bias < 0)))
    refuse("offsets inside an expert's block must not be negative");
  if (job.tokens < 0 || job.top_k < 0 || job.num_experts < 0)
    refuse("the counts of tokens, experts and experts per token must not be negative");
  if (job.tokens > INT32_MAX || job.tokens * job.top_k > INT32_MAX)
    refuse("a job must have fewer than 2^31 pairs of token and expert; split the batch");
  if (job.tokens > 0 && !job.out) refuse("the job has no output");
  if (reinterpret_cast<uintptr_t>(job.divided) % alignof(int32_t)) refuse("the divided expert's words are not aligned");
  if (reinterpret_cast<uintptr_t>(job.done) % alignof(uint32_t) ||
      reinterpret_cast<uintptr_t>(job.busy_ns) % alignof(int64_t))
    refuse("the words for a job's end are not aligned");
  if (job.tokens > 0 && job.top_k > 0 && (!job.hidden || !job.ids || !job.weights || (job.num_experts && !job.experts)))
    refuse("the job lacks hidden states, ids, weights or expert blocks");
}

int64_t slice_tokens(const gr_job &job) {
  const int64_t row = (int64_t{job.format->inter} + 32) * 4 * std::max(job.top_k, 1);
  return std::clamp<int64_t>(kSliceActBytes / row, 64, kSliceTokens);
}

void Plan::build(const gr_job &job, int64_t first, int64_t count, const KernelChoice &kernels,
                 uint32_t threads) {
  format_ = *job.format;
  tokens_ = count;
  out_ = job.out + first * format_.hidden;
  const int64_t top_k = job.top_k;
  const int32_t *ids = job.ids + first * top_k;
  const float *weights = job.weights + first * top_k;
  const int32_t experts = job.num_experts;
  const int64_t slots = count * top_k;
  read_divided(job);

  // A counting sort, stable in the order of tokens.
  begins_.assign(static_cast<size_t>(experts) + 1, 0);
  for (int64_t i = 0; i < slots; ++i)
    if (ids[i] >= 0 && ids[i] < experts) ++begins_[static_cast<size_t>(ids[i]) + 1];
  groups_.clear();
  kernels_.clear();
  const int64_t element = format_.dtype == GR_F32 ? 4 : 2;
  const uint8_t *hidden = static_cast<const uint8_t *>(job.hidden) + first * format_.hidden * element;
  size_t act_bytes = 0;
  kernel_bytes_ = 64;
  act_offsets_.clear();
  for (int32_t e = 0; e < experts; ++e) {
    const int32_t tokens = begins_[static_cast<size_t>(e) + 1];
    begins_[static_cast<size_t>(e) + 1] += begins_[static_cast<size_t>(e)];
    if (!tokens) continue;
    if (!job.experts[e]) refuse("expert " + std::to_string(e) + " was chosen but has no block");
    const Kernel &kernel = choose_kernel(kernels, format_.dtype, tokens);
    groups_.push_back(Group{&format_, static_cast<const uint8_t *>(job.experts[e]), hidden, nullptr, tokens,
                            e == divided_ ? divided_begin_ : 0, nullptr});
    kernels_.push_back(&kernel);
    act_offsets_.push_back(act_bytes);
    act_bytes += (kernel.act_bytes(&format_, tokens) + 63) / 64 * 64;
    kernel_bytes_ = std::max(kernel_bytes_, (kernel.scratch_bytes(&format_) + 63) / 64 * 64);
  }
  pairs_.resize(static_cast<size_t>(begins_[static_cast<size_t>(experts)]));
  for (int64_t t = 0; t < count; ++t)
    for (int64_t k = 0; k < top_k; ++k) {
      const int32_t e = ids[t * top_k + k];
      if (e < 0 || e >= experts) continue;
      // begins_[e] walks to the end of expert e's pairs, which is where those of e + 1 begin.
      pairs_[static_cast<size_t>(begins_[static_cast<size_t>(e)]++)] =
          Pair{static_cast<int32_t>(t), weights[t * top_k + k]};
    }
  act_.reserve(act_bytes);
  int32_t pair = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    groups_[g].pairs = pairs_.data() + pair;
    groups_[g].act = act_.data() + act_offsets_[g];
    pair += groups_[g].count;
  }
  divide(threads);
}

void Plan::read_divided(const gr_job &job) {
  divided_ = job.divided ? job.divided[0] : -1;
  if (divided_ < 0) return;
  divided_begin_ = job.divided[1];
  if (divided_begin_ < 1 || divided_begin_ >= format_.inter || divided_begin_ % kDivisionRows)
    refuse("expert " + std::to_string(divided_) + " cannot be divided at row " + std::to_string(divided_begin_) +
           " of its inner width " + std::to_string(format_.inter) + ", only at a multiple of " +
           std::to_string(kDivisionRows) + " within it");
}

void Plan::divide(uint32_t threads) {
  up_units_.clear();
  down_units_.clear();
  int64_t left = 0;
  for (const Group &group : groups_) left += format_.inter - group.begin;
  int32_t step = 8;
  for (uint32_t g = 0; g < groups_.size(); ++g) {
    for (int32_t row = groups_[g].begin; row < format_.inter;) {
      const int64_t rows = std::min<int64_t>(unit_rows(left, kUpShare * threads, kernels_[g]->up_unit),
                                             format_.inter - row);
      up_units_.push_back(UpUnit{g, row, static_cast<int32_t>(row + rows)});
      row += static_cast<int32_t>(rows);
      left -= rows;
    }
    step = std::max(step, kernels_[g]->down_unit);
  }
  down_rows_ = 0;
  if (!tokens_) return;
  // Every down unit reads all activation rows. With many tokens these outweigh the weights of a narrow unit, so the
  // narrowest is half as wide as an expert has tokens, as long as there are two units a thread.
  const int64_t tokens_an_expert = groups_.empty() ? 0 : static_cast<int64_t>(pairs_.size() / groups_.size());
  const int64_t two_a_thread = round_up(std::max<int64_t>(format_.hidden / (2 * threads), 1), step);
  const int64_t least = std::min(round_up(std::max<int64_t>(tokens_an_expert / 2, 1), step), two_a_thread);
  const int64_t shares = (least == step ? kDownShare : kWideDownShare) * threads;
  const int64_t most = std::clamp<int64_t>(kSumBytes / 4 / tokens_ / step * step, step, kMaxDownRows);
  for (int64_t row = 0; row < format_.hidden;) {
    left = format_.hidden - row;
    const int64_t rows = std::min({unit_rows(left, shares, least), most, left});
    down_rows_ = std::max(down_rows_, static_cast<int32_t>(rows));
    down_units_.push_back(DownUnit{static_cast<int32_t>(row), static_cast<int32_t>(row + rows)});
    row += rows;
  }
  scratch_bytes_ = kernel_bytes_ + sizeof(float) * static_cast<size_t>(tokens_) * static_cast<size_t>(down_rows_);
}

void Plan::run_up(uint32_t unit, void *scratch) const {
  const UpUnit &u = up_units_[unit];
  kernels_[u.group]->up(&groups_[u.group], u.first, u.last, nullptr, scratch);
}

void Plan::run_down(uint32_t unit, void *scratch) const {
  const DownUnit &u = down_units_[unit];
  const int64_t rows = u.last - u.first;
  float *sums = reinterpret_cast<float *>(static_cast<uint8_t *>(scratch) + kernel_bytes_);  // [tokens][rows]
  memset(sums, 0, sizeof(float) * static_cast<size_t>(tokens_ * rows));
  const int64_t offset = format_.down + int64_t{u.first} * format_.inter * (format_.dtype == GR_F32 ? 4 : 2);
  for (size_t g = 0; g < groups_.size(); ++g) {
    // A divided expert's rows have gaps, into which a prefetch from outside must not run.
    const bool more = g + 1 < groups_.size() && !groups_[g + 1].begin;
    const uint8_t *next = more ? groups_[g + 1].block + offset : nullptr;
    kernels_[g]->down(&groups_[g], u.first, u.last, sums, rows, next, scratch);
  }
  for (int64_t t = 0; t < tokens_; ++t)
    memcpy(out_ + t * format_.hidden + u.first, sums + t * rows, sizeof(float) * static_cast<size_t>(rows));
}

}  // namespace greenroom
