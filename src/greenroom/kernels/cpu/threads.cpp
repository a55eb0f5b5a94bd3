#include "threads.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace greenroom {

uint32_t usable_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return static_cast<uint32_t>(CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

void pin(std::thread &thread, int32_t core) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  int error = EINVAL;
  if (core >= 0 && core < CPU_SETSIZE) {
    CPU_SET(core, &set);
    error = pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
  }
  if (error)
    throw std::invalid_argument("a thread cannot be pinned to core " + std::to_string(core) + ": " +
                                std::strerror(error) + "; choose cores that this process may use");
#else
  (void)thread, (void)core;
  throw std::invalid_argument("threads cannot be pinned on this operating system; leave the cores out");
#endif
}

}  // namespace greenroom
