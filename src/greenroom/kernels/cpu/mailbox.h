// Mailboxes: words and buffers in memory shared with a device, which posts jobs there by itself.
//
// Who writes what:
//   request  the device: the number of rows, behind the job's input (release).
//            the poller (whichever worker looks at requests): 0, before the job starts.
//   done     the worker that ends the job: 1, behind output and time (release).
//            the device: 0, before its next request.
// A mailbox has one request outstanding at most. Its record belongs to the poller from the request until the job
// is queued, and then to the job; once done is raised nobody but the next request's poller touches it.
//
// Of mailboxes that are given up, request and done have one more writer: whoever gives them up clears the one and
// raises the other, for a device that waits. Jobs that were seen before go on, write their output and raise done behind
// it. So done says nothing about the output any more, and such mailboxes are never armed again.
#ifndef GREENROOM_MAILBOX_H
#define GREENROOM_MAILBOX_H

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "record.h"

namespace greenroom {

class Mailboxes;

class Mailbox {
 public:
  // Throws std::invalid_argument for a job that makes no sense.
  Mailbox(const gr_mailbox &box, Mailboxes &owner, int32_t index);

  Mailboxes &owner() const { return owner_; }

  bool posted() const { return request_.load(std::memory_order_relaxed) != 0; }

  // The poller, after posted(): the job to start. Null for a request that is refused; done is raised then.
  std::shared_ptr<Record> take();

  // The worker that ended the job.
  void finish();

  // Whether a request has not been answered.
  bool pending() const { return running_.load(std::memory_order_acquire) || posted(); }

  // Forgets a request that nobody will serve, and lets the device go on.
  void release();

 private:
  void raise_done();

  const std::shared_ptr<Record> record_;
  Mailboxes &owner_;
  const int32_t index_;
  const int64_t most_rows_;
  const std::atomic_ref<uint32_t> request_;
  const std::atomic_ref<uint32_t> done_;
  int64_t *const busy_ns_;
  std::chrono::steady_clock::time_point noticed_;
  std::atomic<bool> running_{false};  // true before the request is cleared, false before done is raised
};

// Mailboxes that are armed together.
class Mailboxes {
 public:
  Mailboxes(const gr_mailbox *boxes, int32_t count);

  int32_t pending() const;  // -1: none
  void release();

  bool given_up() const { return given_up_.load(std::memory_order_relaxed); }

  // Keeps the first failure until it is taken.
  void report(int32_t index, const char *sentence) noexcept;
  bool take_failure(int32_t *index, std::string *sentence);
  bool has_failure();

 private:
  friend class Engine;

  std::deque<Mailbox> boxes_;
  bool armed_ = false;       // guarded by the engine's poller role
  // Jobs queued or running. Changed with the engine's mutex held; the last thing that an ended job does with these
  // mailboxes.
  std::atomic<uint32_t> under_way_{0};
  std::atomic<bool> given_up_{false};

  std::mutex failure_mutex_;  // guards everything below
  int32_t failed_ = -1;
  std::string failure_;
};

}  // namespace greenroom
#endif
