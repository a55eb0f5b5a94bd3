// The part of the engine that looks for requests in mailboxes.
#include <algorithm>
#include <stdexcept>

#include "engine.h"

namespace greenroom {
namespace {

constexpr size_t kLooks = 16;  // requests that the poller looks at before it looks for work; a few nanoseconds each

}  // namespace

Engine::PollerRole::PollerRole(Engine &engine, Time until) : engine_(engine) {
  engine_.role_wanted_.fetch_add(1, std::memory_order_relaxed);
  for (uint32_t round = 1; !(held_ = !engine_.polling_.exchange(true, std::memory_order_acquire)); ++round) {
    pause_briefly();
    if (round % 16) continue;
    if (std::chrono::steady_clock::now() >= until) break;
    std::this_thread::yield();
  }
  engine_.role_wanted_.fetch_sub(1, std::memory_order_relaxed);
}

Engine::PollerRole::~PollerRole() {
  if (held_) engine_.polling_.store(false, std::memory_order_release);
}

bool Engine::try_poller_role() {
  return !polling_.load(std::memory_order_relaxed) && !role_wanted_.load(std::memory_order_relaxed) &&
         !polling_.exchange(true, std::memory_order_acquire);
}

// A worker without work while mailboxes are armed. Returns when there may be work, or nothing is armed any more.
void Engine::attend(uint64_t seen) {
  const auto quiet = [&] {
    return control_.load(std::memory_order_acquire) == seen && armed_.load(std::memory_order_relaxed) &&
           !stop_.load(std::memory_order_relaxed);
  };
  for (uint32_t round = 1; quiet(); ++round) {
    if (try_poller_role()) {
      while (!serve(kLooks) && quiet() && !role_wanted_.load(std::memory_order_relaxed) && round % rounds_a_yield_) {
        pause_briefly();
        ++round;
      }
      polling_.store(false, std::memory_order_release);
    }
    pause_briefly();
    // Without the role: whoever runs next may be the one to look.
    if (round % rounds_a_yield_ == 0) std::this_thread::yield();
  }
}

// With the poller role held: looks at the next `looks` mailboxes; true if one had a request.
bool Engine::serve(size_t looks) {
  for (looks = std::min(looks, polled_.size()); looks; --looks) {
    Mailbox &box = *polled_[cursor_];
    if (++cursor_ == polled_.size()) cursor_ = 0;
    if (!box.posted() || box.owner().given_up()) continue;
    if (std::shared_ptr<Record> record = box.take()) {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++box.owner().under_way_;
      enqueue(std::move(record));
    }
    return true;
  }
  return false;
}

void Engine::arm(Mailboxes &mailboxes) {
  {
    const PollerRole role(*this);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) throw std::runtime_error("the CPU engine has ended and serves no mailboxes");
    if (mailboxes.given_up()) throw std::runtime_error("mailboxes that were given up are not armed again");
    if (mailboxes.armed_) return;
    polled_.reserve(polled_.size() + mailboxes.boxes_.size());
    for (Mailbox &box : mailboxes.boxes_) polled_.push_back(&box);
    mailboxes.armed_ = true;
    armed_.store(polled_.size(), std::memory_order_seq_cst);
  }
  parking_.wake_all();
}

void Engine::disarm(Mailboxes &mailboxes) {
  {
    const PollerRole role(*this);
    forget(mailboxes);
  }
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [&] { return mailboxes.under_way_ == 0; });
}

bool Engine::abandon(Mailboxes &mailboxes, std::chrono::milliseconds limit) {
  const auto until = std::chrono::steady_clock::now() + limit;
  // The poller may have looked at it just before, and start one more job; that is waited for like the others.
  if (!mailboxes.given_up_.exchange(true)) mailboxes.release();
  {
    const PollerRole role(*this, until);
    if (!role.held()) return false;  // its holder hangs
    // From here on the number of jobs only falls: the poller counts what it takes before it gives up the role.
    forget(mailboxes);
  }
  // No lock and no condition: a thread may hang while it has the mutex. Acquire: what the jobs wrote.
  while (mailboxes.under_way_.load(std::memory_order_acquire)) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

// With the poller role held.
void Engine::forget(Mailboxes &mailboxes) {
  if (!mailboxes.armed_) return;
  std::erase_if(polled_, [&](const Mailbox *box) { return &box->owner() == &mailboxes; });
  cursor_ = 0;
  mailboxes.armed_ = false;
  armed_.store(polled_.size(), std::memory_order_release);
}

void Engine::disarm_all() {
  const PollerRole role(*this);
  for (Mailbox *box : polled_) box->owner().armed_ = false;
  polled_.clear();
  cursor_ = 0;
  armed_.store(0, std::memory_order_release);
}

}  // namespace greenroom
