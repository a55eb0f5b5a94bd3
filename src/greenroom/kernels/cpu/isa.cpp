#include "isa.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#if GREENROOM_X86
#include <cpuid.h>
#endif
#if GREENROOM_X86 && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace greenroom {
namespace {

#if GREENROOM_X86
struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf cpuid(unsigned leaf, unsigned sub) {
  Leaf r;
  __get_cpuid_count(leaf, sub, &r.eax, &r.ebx, &r.ecx, &r.edx);  // zeros if there is no such leaf
  return r;
}

bool bit(unsigned word, int index) { return (word >> index & 1) != 0; }

// The register files that the operating system saves.
uint64_t enabled_state() {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// Linux gives a process the 8 KiB of tile registers only on request.
bool request_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

uint32_t detect() {
  uint32_t found = 1u << GR_ISA_PORTABLE;
  const Leaf one = cpuid(1, 0), seven = cpuid(7, 0), seven_one = cpuid(7, 1);
  if (!bit(one.ecx, 27)) return found;  // OSXSAVE
  const uint64_t state = enabled_state();
  const bool avx2 = bit(one.ecx, 12) && bit(one.ecx, 28) && bit(one.ecx, 29) && bit(seven.ebx, 5);
  if (!avx2 || (state & 0x6) != 0x6) return found;
  found |= 1u << GR_ISA_AVX2;
  const bool avx512 = bit(seven.ebx, 16) && bit(seven.ebx, 17) && bit(seven.ebx, 30) && bit(seven.ebx, 31);
  if (!avx512 || !bit(seven_one.eax, 5) || (state & 0xe0) != 0xe0) return found;
  found |= 1u << GR_ISA_AVX512_BF16;
  const bool amx = bit(seven.edx, 22) && bit(seven.edx, 24);  // AMX-BF16, AMX-TILE
  if (amx && (state & 0x60000) == 0x60000 && request_tiles()) found |= 1u << GR_ISA_AMX_BF16;
  return found;
}
#else
uint32_t detect() { return 1u << GR_ISA_PORTABLE; }
#endif

const char *const kNames[] = {"portable", "avx2", "avx512-bf16", "amx-bf16"};

}  // namespace

uint32_t supported_isas() {
  static const uint32_t found = detect();
  return found;
}

gr_isa choose_isa(int32_t wanted) {
  const uint32_t found = supported_isas();
  if (wanted < GR_ISA_AUTO || wanted > GR_ISA_AMX_BF16)
    throw std::invalid_argument("there is no instruction set number " + std::to_string(wanted));
  if (wanted != GR_ISA_AUTO) {
    if (!(found >> wanted & 1))
      throw std::invalid_argument(std::string("this processor does not run ") + kNames[wanted] + "; choose auto");
    return static_cast<gr_isa>(wanted);
  }
  int best = GR_ISA_AMX_BF16;
  while (!(found >> best & 1)) --best;
  return static_cast<gr_isa>(best);
}

const Kernel &choose_kernel(const KernelChoice &choice, int32_t dtype, int32_t tokens) {
  const int steady = choice.batch_invariant ? 1 : 0;
#if GREENROOM_X86
  if (choice.isa == GR_ISA_AMX_BF16 && dtype == GR_BF16 && (steady || tokens >= amx_min_tokens)) return amx_kernel;
  if (choice.isa >= GR_ISA_AVX512_BF16) return avx512_kernels[steady][dtype];
  if (choice.isa == GR_ISA_AVX2) return avx2_kernels[steady][dtype];
#else
  (void)tokens;
#endif
  return portable_kernels[steady][dtype];
}

const RowKernel *choose_row_kernel(gr_isa isa, int32_t dtype) {
  const RowKernel *kernels = portable_rows;
#if GREENROOM_X86
  if (isa >= GR_ISA_AVX512_BF16)
    kernels = avx512_rows;
  else if (isa == GR_ISA_AVX2)
    kernels = avx2_rows;
#else
  (void)isa;
#endif
  return kernels[dtype].norm ? &kernels[dtype] : nullptr;
}

const Kernel &choose_linear_kernel(gr_isa isa, int32_t dtype) {
  return choose_kernel(KernelChoice{std::min(isa, GR_ISA_AVX512_BF16), true}, dtype, 1);
}

}  // namespace greenroom
