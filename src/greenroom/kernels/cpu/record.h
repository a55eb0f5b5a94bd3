// One job on its way through the engine, and the queue of those that wait for their turn.
#ifndef GREENROOM_RECORD_H
#define GREENROOM_RECORD_H

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "attention.h"
#include "greenroom_cpu.h"
#include "linear.h"
#include "parking.h"
#include "rows.h"

namespace greenroom {

class Mailbox;

// What a submitter, the workers and whoever waits for the end share about one job.
struct Record {
  explicit Record(const gr_job &from) : job(from), format(*from.format) {
    job.format = &format;
    error.reserve(256);  // a sentence about a lack of memory must not need any
  }
  explicit Record(Linears &&from) : linears(std::move(from)) {}
  explicit Record(Rows &&from) : rows(std::move(from)) {}
  explicit Record(const Attention &from) : attention(from) {}
  Record(const Record &) = delete;
  Record &operator=(const Record &) = delete;

  gr_job job{};
  gr_format format{};
  Linears linears;                // with units: instead of a job, which is all zeros then
  Rows rows;                      // with any: the same
  std::optional<Attention> attention;  // the same
  std::string error;              // written by workers under the engine's failure mutex, read once the job has ended
  std::chrono::steady_clock::time_point began;  // when its turn came
  std::atomic<bool> done{false};  // set by the worker that ends the job, for wait()
  Parking parking;
  Mailbox *mailbox = nullptr;     // who is told of the end instead of wait()
  std::shared_ptr<Record> next;   // while queued
  std::shared_ptr<Record> then;   // the next step of a sequence; whoever waits for that waits for its last one

  // The worker that ended the job: tells a device.
  void raise_done() {
    if (job.busy_ns) {
      const auto busy = std::chrono::steady_clock::now() - began;
      *job.busy_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(busy).count();
    }
    if (job.done) std::atomic_ref<uint32_t>(*job.done).store(job.done_value, std::memory_order_release);
  }
};

// First in, first out. The links are part of the records: queueing never allocates.
class JobQueue {
 public:
  bool empty() const { return !head_; }

  void push(std::shared_ptr<Record> record) {
    Record *last = record.get();
    (head_ ? tail_->next : head_) = std::move(record);
    tail_ = last;
  }

  std::shared_ptr<Record> pop() {
    std::shared_ptr<Record> first = std::move(head_);
    head_ = std::move(first->next);
    return first;
  }

 private:
  std::shared_ptr<Record> head_;
  Record *tail_ = nullptr;
};

}  // namespace greenroom
#endif
