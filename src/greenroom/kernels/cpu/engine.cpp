#include "engine.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "threads.h"

namespace greenroom {
namespace {

// Longer than the gap between two layers of a decode step, and no longer: where other processes want the cores, threads
// that look for work for milliseconds have used up their turn when it comes.
constexpr std::chrono::microseconds kWorkerSpin{200};
constexpr std::chrono::microseconds kCrowdedSpin{5};  // more threads than cores: someone else needs the core
constexpr std::chrono::microseconds kWaiterSpin{50};
constexpr int kLooks = 8;  // without progress, until a wait is given up: a process that was stopped misses one only
constexpr uint32_t kRoundsAYield = 1024;       // of looking for requests; some ten microseconds
constexpr uint32_t kCrowdedRoundsAYield = 16;  // no core is left for the thread that drives the device

uint64_t control_word(uint64_t serial, uint32_t units) { return serial << 32 | units; }
uint32_t unclaimed(uint64_t word) { return static_cast<uint32_t>(word); }

// Of this thread: a pause that the scheduler makes in a unit of work must not be multiplied.
std::chrono::nanoseconds processor_time() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

}  // namespace

Engine::Engine(int32_t threads, const int32_t *cores, const KernelChoice &kernels, bool callers_help)
    : kernels_(kernels),
      threads_(static_cast<uint32_t>(std::max(threads, 0))),
      callers_help_(callers_help && threads > 1) {
  if (threads < 1) throw std::invalid_argument("an engine needs at least one thread, not " + std::to_string(threads));
  const uint32_t cores_here = usable_cores();
  spin_ = threads_ <= cores_here ? kWorkerSpin : kCrowdedSpin;
  rounds_a_yield_ = threads_ < cores_here ? kRoundsAYield : kCrowdedRoundsAYield;
  for (uint32_t i = 0; i < threads_; ++i) scratch_.push_back(std::make_unique<GrowingBuffer>());
  try {
    start(cores);
  } catch (...) {
    stop();
    throw;
  }
}

Engine::~Engine() { close(); }

void Engine::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;  // from here on nothing is armed
  }
  disarm_all();
  {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return !running_; });
  }
  stop();
}

void Engine::start(const int32_t *cores) {
  const SignalsBlocked blocked;
  for (uint32_t i = callers_help_; i < threads_; ++i) {
    workers_.emplace_back(&Engine::work, this, i);
#if defined(__linux__)
    pthread_setname_np(workers_.back().native_handle(), "greenroom-cpu");
#endif
    if (cores) pin(workers_.back(), cores[i]);
  }
}

void Engine::stop() {
  stop_.store(true, std::memory_order_seq_cst);
  parking_.wake_all();
  for (std::thread &worker : workers_) worker.join();
  workers_.clear();
}

void Engine::throttle(double factor) {
  if (!(factor >= 1) || !std::isfinite(factor))
    throw std::invalid_argument("work can be made to take 1 or more times as long, not " + std::to_string(factor));
  throttle_.store(factor, std::memory_order_relaxed);
}

uint64_t Engine::submit(const gr_job &job) {
  check_job(job);
  const auto record = std::make_shared<Record>(job);
  return submit(record, record);
}

uint64_t Engine::submit(const gr_linear &linear) {
  const gr_step step{GR_STEP_LINEAR, 1, &linear};
  return submit(&step, 1);
}

uint64_t Engine::submit(const gr_attention &attention) {
  const gr_step step{GR_STEP_ATTENTION, 1, &attention};
  return submit(&step, 1);
}

uint64_t Engine::submit(const gr_step *steps, int32_t count) {
  if (count < 1) throw std::invalid_argument("a sequence has at least one step, not " + std::to_string(count));
  const std::shared_ptr<Record> first = record_of(steps[0]);
  std::shared_ptr<Record> last = first;
  for (int32_t i = 1; i < count; ++i) last = last->then = record_of(steps[i]);
  return submit(first, last);
}

std::shared_ptr<Record> Engine::record_of(const gr_step &step) const {
  if (step.count < 1 || !step.what || (step.kind == GR_STEP_ATTENTION && step.count > 1))
    throw std::invalid_argument("a step of a sequence has too little or too much to do");
  switch (step.kind) {
    case GR_STEP_LINEAR: {
      std::vector<Linear> parts;
      for (int32_t i = 0; i < step.count; ++i)
        parts.emplace_back(static_cast<const gr_linear *>(step.what)[i], kernels_.isa, threads_);
      return std::make_shared<Record>(Linears(std::move(parts)));
    }
    case GR_STEP_ROWS: {
      const gr_row *rows = static_cast<const gr_row *>(step.what);
      return std::make_shared<Record>(Rows({rows, rows + step.count}, kernels_.isa));
    }
    case GR_STEP_ATTENTION:
      return std::make_shared<Record>(Attention(*static_cast<const gr_attention *>(step.what), kernels_.isa));
    default: throw std::invalid_argument("there is no step of kind " + std::to_string(step.kind));
  }
}

uint64_t Engine::submit(std::shared_ptr<Record> first, std::shared_ptr<Record> last) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t ticket = ++tickets_;
  records_.emplace(ticket, std::move(last));
  enqueue(std::move(first));
  return ticket;
}

std::optional<std::string> Engine::wait(uint64_t ticket, std::chrono::milliseconds limit) {
  std::shared_ptr<Record> record;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = records_.find(ticket);
    if (found == records_.end())
      throw std::invalid_argument("there is no job number " + std::to_string(ticket) +
                                  " to wait for; each job is waited for once");
    record = found->second;
  }
  if (callers_help_) help(*record);
  const auto done = [&] { return record->done.load(std::memory_order_seq_cst); };
  auto before = progress();
  for (int idle = 0; !record->parking.wait_for(done, kWaiterSpin, std::chrono::microseconds(limit) / kLooks);) {
    const auto now = progress();
    idle = now == before ? idle + 1 : 0;
    if (idle == kLooks) return std::nullopt;
    before = now;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  records_.erase(ticket);
  return record->error;
}

// Changes whenever a unit is claimed or finished.
std::pair<uint64_t, uint32_t> Engine::progress() const {
  return {control_.load(std::memory_order_relaxed), unfinished_.load(std::memory_order_relaxed)};
}

void Engine::work(size_t worker) {
  for (;;) {
    const Claim taken = claim();
    if (taken.any) {
      finish_unit(taken.unit, worker, throttle_.load(std::memory_order_relaxed));
      continue;
    }
    if (stop_.load(std::memory_order_seq_cst)) return;
    if (armed_.load(std::memory_order_acquire)) {
      attend(taken.word);
      continue;
    }
    parking_.wait(
        [&] {
          return control_.load(std::memory_order_seq_cst) != taken.word ||
                 armed_.load(std::memory_order_seq_cst) != 0 || stop_.load(std::memory_order_seq_cst);
        },
        spin_);
  }
}

// A thread that waits for `record` takes units like a worker, of whatever job is current: so the thread that goes on
// behind the job has a core, and is awake when it ends. Returns when the job has ended, or there has been nothing to do
// for as long as a worker looks for work; at once while work is throttled, since a caller's patience has a limit.
void Engine::help(const Record &record) {
  if (helping_.exchange(true, std::memory_order_acquire)) return;
  const auto done = [&] { return record.done.load(std::memory_order_acquire); };
  auto idle_since = std::chrono::steady_clock::now();
  while (!done() && throttle_.load(std::memory_order_relaxed) <= 1) {
    const Claim taken = claim();
    if (taken.any) {
      finish_unit(taken.unit, 0, 1);
      idle_since = std::chrono::steady_clock::now();
      continue;
    }
    for (int i = 0; i < 32 && !done() && control_.load(std::memory_order_acquire) == taken.word; ++i) pause_briefly();
    if (std::chrono::steady_clock::now() - idle_since > spin_) break;
  }
  helping_.store(false, std::memory_order_release);
}

void Engine::finish_unit(uint32_t unit, size_t worker, double factor) {
  if (factor > 1)
    run_throttled(unit, worker, factor);
  else
    run(unit, worker);
  // Release: what this thread wrote is visible to the one that finishes the last unit, which acquires.
  if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) advance();
}

Engine::Claim Engine::claim() {
  uint64_t word = control_.load(std::memory_order_acquire);
  for (;;) {
    const uint32_t left = unclaimed(word);
    if (!left) return Claim{false, 0, word};
    if (control_.compare_exchange_weak(word, word - 1, std::memory_order_acq_rel, std::memory_order_acquire))
      return Claim{true, units_ - left, word};
  }
}

void Engine::run(uint32_t unit, size_t worker) {
  // After a failure the remaining units are only counted.
  if (failed_.load(std::memory_order_relaxed)) return;
  try {
    switch (phase_) {
      case Phase::prepare: prepare_slice(); break;
      case Phase::up: plan_.run_up(unit, scratch_[worker]->data()); break;
      case Phase::down: plan_.run_down(unit, scratch_[worker]->data()); break;
      case Phase::linear: current_->linears.run(unit); break;
      case Phase::rows: current_->rows.run(); break;
      case Phase::attend: current_->attention->run(unit); break;
    }
  } catch (const std::bad_alloc &) {
    fail("the CPU engine could not get memory for this batch; use smaller batches");
  } catch (const std::exception &error) {
    fail(error.what());
  } catch (...) {
    fail("the CPU engine failed for an unknown reason");
  }
}

void Engine::run_throttled(uint32_t unit, size_t worker, double factor) {
  const std::chrono::nanoseconds begin = processor_time();
  run(unit, worker);
  const auto rest = (processor_time() - begin) * (factor - 1);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(rest);
  while (std::chrono::steady_clock::now() < end && throttle_.load(std::memory_order_relaxed) == factor)
    pause_briefly();
}

void Engine::fail(const char *sentence) {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  if (!failed_.exchange(true)) current_->error = sentence;
}

// The only unit of its phase: this thread alone works for the job now.
void Engine::prepare_slice() {
  const gr_job &job = current_->job;
  slice_end_ = std::min(job.tokens, slice_begin_ + slice_tokens(job));
  plan_.build(job, slice_begin_, slice_end_ - slice_begin_, kernels_, threads_);
  for (const auto &buffer : scratch_) buffer->reserve(plan_.scratch_bytes());
}

void Engine::publish(Phase phase, uint32_t units) {
  phase_ = phase;
  units_ = units;
  unfinished_.store(units, std::memory_order_relaxed);
  const uint64_t serial = (control_.load(std::memory_order_relaxed) >> 32) + 1;
  control_.store(control_word(serial, units), std::memory_order_seq_cst);
  parking_.wake_all();
}

// Called by the thread that finished a phase's last unit. Ends by publishing a phase with units in it, or idle.
void Engine::advance() {
  const bool one_phase = phase_ == Phase::linear || phase_ == Phase::rows || phase_ == Phase::attend;
  if (failed_.load(std::memory_order_relaxed) || one_phase) return finish_job();
  if (phase_ == Phase::prepare && plan_.up_units()) return publish(Phase::up, plan_.up_units());
  if (phase_ != Phase::down && plan_.down_units()) return publish(Phase::down, plan_.down_units());
  if (slice_end_ < current_->job.tokens) {
    slice_begin_ = slice_end_;
    return publish(Phase::prepare, 1);
  }
  finish_job();
}

void Engine::finish_job() {
  std::shared_ptr<Record> finished = std::move(current_);
  current_.reset();
  while (finished->then) {
    std::shared_ptr<Record> then = std::move(finished->then);
    if (!failed_.load(std::memory_order_relaxed)) return start_job(std::move(then));
    then->error.swap(finished->error);
    finished = std::move(then);
  }
  Mailboxes *mailboxes = nullptr;
  if (finished->mailbox) {
    mailboxes = &finished->mailbox->owner();  // alive until under_way_ falls below
    finished->mailbox->finish();              // a device waits: nothing comes before it
  } else {
    finished->raise_done();
  }
  // A queue that never empties leaves a single worker no other time for requests.
  if (armed_.load(std::memory_order_relaxed) && try_poller_role()) {
    serve(polled_.size());
    polling_.store(false, std::memory_order_release);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (mailboxes && --mailboxes->under_way_ == 0) idle_.notify_all();
    if (queue_.empty()) {
      running_ = false;
      idle_.notify_all();
    } else {
      start_job(queue_.pop());
    }
  }
  if (mailboxes) return;
  finished->done.store(true, std::memory_order_seq_cst);
  finished->parking.wake_all();
}

// With mutex_ held.
void Engine::enqueue(std::shared_ptr<Record> record) {
  if (running_) return queue_.push(std::move(record));
  // Nobody holds a unit while the engine is idle, so this thread may write the phase data.
  running_ = true;
  start_job(std::move(record));
}

// By a thread that is alone in having a claim on the phase data.
void Engine::start_job(std::shared_ptr<Record> record) {
  current_ = std::move(record);
  current_->began = std::chrono::steady_clock::now();
  slice_begin_ = 0;
  failed_.store(false, std::memory_order_relaxed);
  if (const uint32_t units = current_->linears.units()) return publish(Phase::linear, units);
  if (current_->rows.any()) return publish(Phase::rows, 1);
  if (current_->attention) return publish(Phase::attend, current_->attention->units());
  publish(Phase::prepare, 1);
}

}  // namespace greenroom
