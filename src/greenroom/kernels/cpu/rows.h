// What lies between the products of one token, as one unit of work.
#ifndef GREENROOM_ROWS_H
#define GREENROOM_ROWS_H

#include <vector>

#include "isa.h"

namespace greenroom {

class Rows {
 public:
  Rows() = default;

  // Throws std::invalid_argument with a sentence for an unknown kind or dtype.
  Rows(std::vector<gr_row> rows, gr_isa isa);

  bool any() const { return !rows_.empty(); }

  void run() const;  // one after another

 private:
  std::vector<gr_row> rows_;
  std::vector<const RowKernel *> kernels_;  // of each row
};

}  // namespace greenroom
#endif
