// Waiting for a word to change: spin for a while, then sleep without using the processor, for ever or up to a limit.
#ifndef GREENROOM_PARKING_H
#define GREENROOM_PARKING_H

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#endif

namespace greenroom {

inline void pause_briefly() {
#if GREENROOM_X86
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Threads sleep here until `ready()` may have become true. What makes it true must be a sequentially
// consistent write that is followed by wake_all().
//
// No wake-up is lost: a sleeper counts itself before its last look at ready(), and a waker looks at that
// count after its write. One of the two therefore sees the other. If the waker sees the sleeper, it
// changes word_, which the sleeper read before its last look; the kernel then refuses to let it sleep.
class Parking {
 public:
  template <class Ready>
  void wait(Ready ready, std::chrono::microseconds spin) {
    if (spin_until(ready, spin)) return;
    while (!sleep_unless(ready, nullptr)) {
    }
  }

  // False if it is not ready once `limit` has passed.
  template <class Ready>
  bool wait_for(Ready ready, std::chrono::microseconds spin, std::chrono::microseconds limit) {
    const auto end = std::chrono::steady_clock::now() + limit;
    if (spin_until(ready, std::min(spin, limit))) return true;
    for (;;) {
      const std::chrono::nanoseconds left = end - std::chrono::steady_clock::now();
      if (left.count() <= 0) return ready();
      if (sleep_unless(ready, &left)) return true;
    }
  }

  void wake_all() {
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    word_.fetch_add(1, std::memory_order_seq_cst);
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
    word_.notify_all();
#endif
  }

 private:
  template <class Ready>
  static bool spin_until(Ready &ready, std::chrono::microseconds spin) {
    const auto start = std::chrono::steady_clock::now();
    do {
      for (int i = 0; i < 32; ++i) {
        if (ready()) return true;
        pause_briefly();
      }
    } while (std::chrono::steady_clock::now() - start < spin);
    return false;
  }

  // Once; whether it is ready then. limit: null for none.
  template <class Ready>
  bool sleep_unless(Ready &ready, const std::chrono::nanoseconds *limit) {
    const uint32_t seen = word_.load(std::memory_order_seq_cst);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const bool now = ready();
    if (!now) sleep(seen, limit);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    return now || ready();
  }

  void sleep(uint32_t seen, const std::chrono::nanoseconds *limit) {
#if defined(__linux__)
    timespec time{};
    if (limit) {
      time.tv_sec = static_cast<time_t>(limit->count() / 1'000'000'000);
      time.tv_nsec = static_cast<long>(limit->count() % 1'000'000'000);
    }
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word_), FUTEX_WAIT_PRIVATE, seen, limit ? &time : nullptr, nullptr,
            0);
#else
    if (limit)
      std::this_thread::sleep_for(std::min(*limit, std::chrono::nanoseconds(1'000'000)));
    else
      word_.wait(seen);
#endif
  }

  std::atomic<uint32_t> word_{0};
  std::atomic<uint32_t> sleepers_{0};
};

}  // namespace greenroom
#endif
