#include "plan.h"

#include <string.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace greenroom {
namespace {

constexpr int64_t kSliceActBytes = int64_t{128} << 20;
constexpr int64_t kSliceTokens = 4096;
constexpr int32_t kDownBlockRows = 128;  // output columns of one pass over the experts: they stay in cache
constexpr int32_t kMaxWidth = 1 << 30;  // row numbers plus a block must fit 32 bits
constexpr int64_t kMaxUnits = int64_t{1} << 31;

[[noreturn]] void refuse(const std::string &sentence) { throw std::invalid_argument(sentence); }

int64_t units_of(int64_t rows, int64_t unit) { return (rows + unit - 1) / unit; }

}  // namespace

void check_job(const gr_job &job) {
  if (!job.format) refuse("the job has no expert format");
  const gr_format &f = *job.format;
  if (f.hidden < 1 || f.inter < 1)
    refuse("expert widths must be positive, not hidden=" + std::to_string(f.hidden) +
           " and inter=" + std::to_string(f.inter));
  if (f.hidden > kMaxWidth || f.inter > kMaxWidth) refuse("expert widths above 2^30 are not supported");
  if (f.dtype < GR_BF16 || f.dtype > GR_F32) refuse("there is no weight dtype number " + std::to_string(f.dtype));
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
  if (job.tokens > 0 && job.top_k > 0 && (!job.hidden || !job.ids || !job.weights || (job.num_experts && !job.experts)))
    refuse("the job lacks hidden states, ids, weights or expert blocks");
}

int64_t slice_tokens(const gr_job &job) {
  const int64_t row = (int64_t{job.format->inter} + 32) * 4 * std::max(job.top_k, 1);
  return std::clamp<int64_t>(kSliceActBytes / row, 64, kSliceTokens);
}

void Plan::build(const gr_job &job, int64_t first, int64_t count, gr_isa isa) {
  format_ = *job.format;
  tokens_ = count;
  out_ = job.out + first * format_.hidden;
  const int64_t top_k = job.top_k;
  const int32_t *ids = job.ids + first * top_k;
  const float *weights = job.weights + first * top_k;
  const int32_t experts = job.num_experts;
  const int64_t slots = count * top_k;

  // A counting sort, stable in the order of tokens.
  begins_.assign(static_cast<size_t>(experts) + 1, 0);
  for (int64_t i = 0; i < slots; ++i)
    if (ids[i] >= 0 && ids[i] < experts) ++begins_[static_cast<size_t>(ids[i]) + 1];
  groups_.clear();
  kernels_.clear();
  group_units_.assign(1, 0);
  const int64_t element = format_.dtype == GR_F32 ? 4 : 2;
  const uint8_t *hidden = static_cast<const uint8_t *>(job.hidden) + first * format_.hidden * element;
  size_t act_bytes = 0;
  int64_t units = 0;
  down_rows_ = 1;
  scratch_bytes_ = 64;
  act_offsets_.clear();
  for (int32_t e = 0; e < experts; ++e) {
    const int32_t tokens = begins_[static_cast<size_t>(e) + 1];
    begins_[static_cast<size_t>(e) + 1] += begins_[static_cast<size_t>(e)];
    if (!tokens) continue;
    if (!job.experts[e]) refuse("expert " + std::to_string(e) + " was chosen but has no block");
    const Kernel &kernel = choose_kernel(isa, format_.dtype, tokens);
    groups_.push_back(Group{&format_, static_cast<const uint8_t *>(job.experts[e]), hidden, out_, nullptr, tokens,
                            nullptr});
    kernels_.push_back(&kernel);
    act_offsets_.push_back(act_bytes);
    act_bytes += (kernel.act_bytes(&format_, tokens) + 63) / 64 * 64;
    units += units_of(format_.inter, kernel.up_unit);
    if (units >= kMaxUnits) refuse("the job is too large; split the batch");
    group_units_.push_back(static_cast<uint32_t>(units));
    down_rows_ = std::max(down_rows_, kernel.down_unit);
    scratch_bytes_ = std::max(scratch_bytes_, kernel.scratch_bytes(&format_));
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
  if (groups_.empty()) down_rows_ = kDownBlockRows;
  up_units_ = static_cast<uint32_t>(units);
  down_units_ = count ? static_cast<uint32_t>(units_of(format_.hidden, down_rows_)) : 0;
}

void Plan::run_up(uint32_t first, uint32_t count, void *scratch) const {
  const uint32_t last = first + count;
  size_t g = static_cast<size_t>(std::upper_bound(group_units_.begin(), group_units_.end(), first) -
                                 group_units_.begin() - 1);
  for (; first < last; ++g) {
    const uint32_t begin = group_units_[g], end = std::min(last, group_units_[g + 1]);
    const Kernel &kernel = *kernels_[g];
    const int64_t from = int64_t{first - begin} * kernel.up_unit;
    const int64_t to = std::min<int64_t>(int64_t{end - begin} * kernel.up_unit, format_.inter);
    const uint8_t *next = end < last ? groups_[g + 1].block + format_.up : nullptr;
    kernel.up(&groups_[g], static_cast<int32_t>(from), static_cast<int32_t>(to), next, scratch);
    first = end;
  }
}

void Plan::run_down(uint32_t first, uint32_t count, void *scratch) const {
  const int32_t last = static_cast<int32_t>(
      std::min<int64_t>((int64_t{first} + count) * down_rows_, format_.hidden));
  const int64_t row_bytes = int64_t{format_.inter} * (format_.dtype == GR_F32 ? 4 : 2);
  for (int32_t row = static_cast<int32_t>(int64_t{first} * down_rows_); row < last; row += kDownBlockRows) {
    const int32_t end = std::min(last, row + kDownBlockRows);
    for (int64_t t = 0; t < tokens_; ++t)
      memset(out_ + t * format_.hidden + row, 0, sizeof(float) * static_cast<size_t>(end - row));
    for (size_t g = 0; g < groups_.size(); ++g) {
      const uint8_t *next = g + 1 < groups_.size() ? groups_[g + 1].block + format_.down + row * row_bytes : nullptr;
      kernels_[g]->down(&groups_[g], row, end, next, scratch);
    }
  }
}

}  // namespace greenroom
