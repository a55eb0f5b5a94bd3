#include "attention.h"

#include <string>

#include "refuse.h"

namespace greenroom {
namespace {

const gr_attention &checked(const gr_attention &a) {
  check_dtype(a.dtype);
  if (a.length < 1 || a.length > kMaxSize) refuse("attention needs 1 to 2^30 positions, not " + std::to_string(a.length));
  if (a.key_heads < 1 || a.heads < 1 || a.heads % a.key_heads || a.heads / a.key_heads > kMostGroup)
    refuse("attention needs 1 to " + std::to_string(kMostGroup) + " query heads a key head, not " +
           std::to_string(a.heads) + " over " + std::to_string(a.key_heads));
  if (a.width < 1 || a.width > kMaxSize) refuse("heads must have a positive width, not " + std::to_string(a.width));
  if (a.value_width < 1 || a.value_width > kMostValueWidth || a.value_width % kValueStep)
    refuse("values must be a multiple of " + std::to_string(kValueStep) + " wide and at most " +
           std::to_string(kMostValueWidth) + ", not " + std::to_string(a.value_width));
  if (!a.q || !a.k || !a.v || !a.out) refuse("attention lacks queries, keys, values or output");
  return a;
}

}  // namespace

Attention::Attention(const gr_attention &attention, gr_isa isa)
    : attention_(checked(attention)), kernel_(choose_row_kernel(isa, attention.dtype)) {
  if (!kernel_) refuse("attention is computed in bf16 and fp32 only");
}

}  // namespace greenroom
