// What is refused of a caller's arguments.
#ifndef GREENROOM_REFUSE_H
#define GREENROOM_REFUSE_H

#include <stdint.h>

#include <stdexcept>
#include <string>

#include "greenroom_cpu.h"

namespace greenroom {

constexpr int64_t kMaxSize = 1 << 30;  // of rows and columns: a row's number plus a block must fit 32 bits

[[noreturn]] inline void refuse(const std::string &sentence) { throw std::invalid_argument(sentence); }

inline void check_dtype(int32_t dtype) {
  if (dtype < GR_BF16 || dtype > GR_F32) refuse("there is no weight dtype number " + std::to_string(dtype));
}

}  // namespace greenroom
#endif
