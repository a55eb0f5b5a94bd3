// Cores, pinning and signals of worker threads.
#ifndef GREENROOM_THREADS_H
#define GREENROOM_THREADS_H

#include <signal.h>
#include <stdint.h>

#include <thread>

namespace greenroom {

// How many this process may use.
uint32_t usable_cores();

// Throws std::invalid_argument.
void pin(std::thread &thread, int32_t core);

// Signals belong to the program's own threads: those started within this scope get none.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &old_, nullptr); }

 private:
  sigset_t old_;
};

}  // namespace greenroom
#endif
