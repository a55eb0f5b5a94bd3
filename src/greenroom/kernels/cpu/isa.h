// Which instruction sets this processor runs, and which kernel serves an expert.
#ifndef GREENROOM_ISA_H
#define GREENROOM_ISA_H

#include "kernel.h"

namespace greenroom {

// Bits 1 << gr_isa. The first call asks the operating system for the AMX registers, which holds for all
// threads of the process; later calls return the same answer.
uint32_t supported_isas();

// The best supported one for GR_ISA_AUTO, otherwise `wanted`; throws std::invalid_argument if it cannot run.
gr_isa choose_isa(int32_t wanted);

// What decides, besides the job, how an expert is computed. batch_invariant: its number of tokens does not.
struct KernelChoice {
  gr_isa isa;
  bool batch_invariant;
};

// Depends on nothing but its arguments, so that results do not depend on threads.
const Kernel &choose_kernel(const KernelChoice &choice, int32_t dtype, int32_t tokens);

// For products of a few rows with a dense matrix: always batch-invariant, and without AMX.
const Kernel &choose_linear_kernel(gr_isa isa, int32_t dtype);

// Null if there is none for the dtype.
const RowKernel *choose_row_kernel(gr_isa isa, int32_t dtype);

}  // namespace greenroom
#endif
