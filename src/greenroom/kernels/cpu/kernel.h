// What the engine asks of a kernel: two projections of one expert over the tokens that chose it, and products of a few
// rows with a dense matrix.
//
// This header is included by files compiled for different instruction sets. It must hold nothing that
// the linker could share between them (no inline functions, no standard containers): otherwise code
// built for AVX-512 could end up in the path that older processors take.
#ifndef GREENROOM_KERNEL_H
#define GREENROOM_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include "greenroom_cpu.h"

namespace greenroom {

// One chosen expert of one token.
struct Pair {
  int32_t token;
  float weight;
};

// One expert with all its tokens. Read-only for kernels, except what act points to.
struct Group {
  const gr_format *format;
  const uint8_t *block;    // the expert's weights
  const uint8_t *hidden;   // [tokens, format->hidden] of format->dtype
  const Pair *pairs;       // [count], ascending tokens
  int32_t count;           // >= 1
  int32_t begin;           // rows of `inter` before this one are somebody else's; a multiple of 32, mostly 0
  uint8_t *act;            // activation rows between the projections, in the kernel's own layout
};

// next: where the caller will read weights after this call, or null; a hint for prefetching.
// scratch: scratch_bytes of the calling thread, 64-byte aligned, no promise about its content.
struct Kernel {
  int32_t up_unit;   // rows of `inter` or of a matrix that are not divided between threads; a call starts at a multiple
  int32_t down_unit; // the same for rows of the output
  size_t (*act_bytes)(const gr_format *format, int32_t count);
  size_t (*scratch_bytes)(const gr_format *format);
  // act[:, first:last] = activation(first projection), for rows from group->begin on
  void (*up)(const Group *group, int32_t first, int32_t last, const uint8_t *next, void *scratch);
  // sums[token, 0:last-first] += weight * (second projection of act[:, group->begin:])[first:last], one pair after
  // another; the distance between tokens is sums_pitch floats
  void (*down)(const Group *group, int32_t first, int32_t last, float *sums, int64_t sums_pitch,
               const uint8_t *next, void *scratch);
  // y[:, first:last]; first is a multiple of up_unit. Null: another kernel serves
  void (*linear)(const gr_linear *linear, int32_t first, int32_t last);
};

constexpr int32_t kMostExperts = 1024, kMostChoices = 32;       // of a router
constexpr int32_t kMostGroup = 32, kMostValueWidth = 512;       // query heads of a key head; width of its values
constexpr int32_t kValueStep = 16;                              // widths of values are multiples of it

// What a model does with tokens between its products; all of one dtype, contiguous unless said otherwise.
struct RowKernel {
  // y = weight * (x / sqrt(mean(x^2) + epsilon)), the quotient rounded first. x, y: [rows, width]; weight: [width]
  void (*norm)(const void *x, const void *weight, void *y, int64_t rows, int32_t width, float epsilon);
  // Rotary embedding, halves of whole heads turned against each other. x, y: [heads, tokens, width], width even;
  // cosines, sines: [tokens, width]
  void (*turn)(const void *x, const void *cosines, const void *sines, void *y, int64_t heads, int64_t tokens,
               int32_t width);
  // The top_k largest of softmax(logits), largest first and of equal ones the first, divided by their sum if normalise.
  // logits: [tokens, experts]; weights, ids: [tokens, top_k]
  void (*choose)(const void *logits, int64_t tokens, int32_t experts, int32_t top_k, bool normalise, float *weights,
                 int64_t *ids);
  // All query heads of one key head
  void (*attend)(const gr_attention *attention, int32_t key_head);
};

// One table per instruction set, indexed by gr_dtype; nothing for fp16.
extern const RowKernel portable_rows[3];
extern const RowKernel avx2_rows[3];
extern const RowKernel avx512_rows[3];

// One table per instruction set, indexed by gr_dtype. The first kernels add up an expert's products in an order that
// depends on how many tokens it has, the second ones do not.
extern const Kernel portable_kernels[2][3];
extern const Kernel avx2_kernels[2][3];
extern const Kernel avx512_kernels[2][3];
extern const Kernel amx_kernel;  // bf16 only; the order is always the same
extern const int32_t amx_min_tokens;  // with fewer tokens the dot products of avx512_kernels were faster

}  // namespace greenroom
#endif
