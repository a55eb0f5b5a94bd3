#include "mailbox.h"

#include <stdio.h>

#include <algorithm>
#include <stdexcept>

#include "plan.h"

namespace greenroom {
namespace {

template <class T>
void check_word(const T *word, const char *name) {
  if (!word || reinterpret_cast<uintptr_t>(word) % sizeof(T))
    throw std::invalid_argument(std::string("a mailbox needs an aligned word for ") + name);
}

const gr_mailbox &checked(const gr_mailbox &box) {
  check_job(box.job);
  if (box.job.tokens < 1) throw std::invalid_argument("a mailbox needs room for at least one row");
  check_word(box.request, "requests");
  check_word(box.done, "the end of a job");
  check_word(box.busy_ns, "the time of a job");
  return box;
}

}  // namespace

Mailbox::Mailbox(const gr_mailbox &box, Mailboxes &owner, int32_t index)
    : record_(std::make_shared<Record>(checked(box).job)),
      owner_(owner),
      index_(index),
      most_rows_(box.job.tokens),
      request_(*box.request),
      done_(*box.done),
      busy_ns_(box.busy_ns) {
  record_->mailbox = this;
}

std::shared_ptr<Record> Mailbox::take() {
  noticed_ = std::chrono::steady_clock::now();
  const uint32_t rows = request_.load(std::memory_order_acquire);  // and with it what the device wrote before
  running_.store(true, std::memory_order_relaxed);
  // Release: whoever sees the request gone sees the job under way. Done is raised behind this, through the job.
  request_.store(0, std::memory_order_release);
  if (rows > static_cast<uint64_t>(most_rows_)) {
    char sentence[128];
    snprintf(sentence, sizeof(sentence), "a device asked for %u rows of a mailbox that holds %lld", rows,
             static_cast<long long>(most_rows_));
    owner_.report(index_, sentence);
    raise_done();
    return nullptr;
  }
  record_->job.tokens = rows;
  record_->error.clear();
  return record_;
}

void Mailbox::finish() {
  if (!record_->error.empty()) owner_.report(index_, record_->error.c_str());
  raise_done();
}

void Mailbox::raise_done() {
  // While another job ran, this one was only waiting. A refused request has had no turn.
  const auto busy = std::chrono::steady_clock::now() - std::max(noticed_, record_->began);
  *busy_ns_ = std::chrono::duration_cast<std::chrono::nanoseconds>(busy).count();
  running_.store(false, std::memory_order_release);
  done_.store(1, std::memory_order_release);
}

void Mailbox::release() {
  request_.store(0, std::memory_order_relaxed);
  done_.store(1, std::memory_order_release);
}

Mailboxes::Mailboxes(const gr_mailbox *boxes, int32_t count) {
  if (count < 1 || !boxes) throw std::invalid_argument("there must be at least one mailbox");
  failure_.reserve(256);
  for (int32_t i = 0; i < count; ++i) boxes_.emplace_back(boxes[i], *this, i);
}

int32_t Mailboxes::pending() const {
  for (size_t i = 0; i < boxes_.size(); ++i)
    if (boxes_[i].pending()) return static_cast<int32_t>(i);
  return -1;
}

void Mailboxes::release() {
  for (Mailbox &box : boxes_) box.release();
}

void Mailboxes::report(int32_t index, const char *sentence) noexcept {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  if (failed_ >= 0) return;
  failed_ = index;
  try {
    failure_ = sentence;
  } catch (...) {
    failure_.clear();
  }
}

bool Mailboxes::has_failure() {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  return failed_ >= 0;
}

bool Mailboxes::take_failure(int32_t *index, std::string *sentence) {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  if (failed_ < 0) return false;
  *sentence = failure_;
  *index = failed_;
  failed_ = -1;
  return true;
}

}  // namespace greenroom
