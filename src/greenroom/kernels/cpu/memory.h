// A reusable block of memory that only grows.
#ifndef GREENROOM_MEMORY_H
#define GREENROOM_MEMORY_H

#include <stdint.h>
#include <stdlib.h>

#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace greenroom {

class GrowingBuffer {
 public:
  GrowingBuffer() = default;
  GrowingBuffer(const GrowingBuffer &) = delete;
  GrowingBuffer &operator=(const GrowingBuffer &) = delete;
  ~GrowingBuffer() { free(data_); }

  uint8_t *data() const { return data_; }

  // At least `bytes`, aligned to a cache line. The content is lost when it grows. Throws std::bad_alloc,
  // and is empty then.
  void reserve(size_t bytes) {
    if (bytes <= size_) return;
    free(data_);
    data_ = nullptr;
    size_ = 0;
    constexpr size_t huge = size_t{2} << 20;
    const size_t alignment = bytes >= huge ? huge : 64;
    void *fresh = nullptr;
    if (bytes > SIZE_MAX - huge || posix_memalign(&fresh, alignment, bytes) != 0) throw std::bad_alloc();
#if defined(__linux__)
    if (bytes >= huge) madvise(fresh, bytes / huge * huge, MADV_HUGEPAGE);  // advice: failing is fine
#endif
    data_ = static_cast<uint8_t *>(fresh);
    size_ = bytes;
  }

 private:
  uint8_t *data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace greenroom
#endif
