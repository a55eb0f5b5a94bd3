// Attention of one new token, divided into the heads of the keys.
#ifndef GREENROOM_ATTENTION_H
#define GREENROOM_ATTENTION_H

#include "isa.h"

namespace greenroom {

class Attention {
 public:
  // Throws std::invalid_argument with a sentence if it makes no sense.
  Attention(const gr_attention &attention, gr_isa isa);

  uint32_t units() const { return static_cast<uint32_t>(attention_.key_heads); }  // at least 1

  void run(uint32_t unit) const { kernel_->attend(&attention_, static_cast<int32_t>(unit)); }

 private:
  gr_attention attention_;
  const RowKernel *kernel_;
};

}  // namespace greenroom
#endif
