// Worker threads, the queue of jobs, and how the threads share the work of one job.
#ifndef GREENROOM_ENGINE_H
#define GREENROOM_ENGINE_H

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "mailbox.h"
#include "parking.h"
#include "plan.h"
#include "record.h"

namespace greenroom {

class Engine {
 public:
  // Throws std::invalid_argument and std::system_error. cores: null or one number a thread. callers_help: whoever waits
  // for a job is one of the threads, the one that the first core is left to; ignored if there is only one.
  Engine(int32_t threads, const int32_t *cores, const KernelChoice &kernels, bool callers_help);
  ~Engine();
  Engine(const Engine &) = delete;
  Engine &operator=(const Engine &) = delete;

  gr_isa isa() const { return kernels_.isa; }

  uint64_t submit(const gr_job &job);
  uint64_t submit(const gr_linear &linear);
  uint64_t submit(const gr_attention &attention);
  uint64_t submit(const gr_step *steps, int32_t count);

  // Waits for the job and forgets it: empty when it succeeded, otherwise what went wrong. Nothing if for `limit` none
  // of the engine's work ends; the job may then be waited for again.
  std::optional<std::string> wait(uint64_t ticket, std::chrono::milliseconds limit);

  // Between the two, workers stay awake and look for requests. Both are idempotent; disarm returns when no job of
  // these mailboxes is queued or running. Throws std::runtime_error once the engine has ended.
  void arm(Mailboxes &mailboxes);
  void disarm(Mailboxes &mailboxes);

  // At once: nothing more is begun for these mailboxes, and no device waits for them. Then true if within `limit` no
  // job of theirs is queued or running, and nobody looks at them. Holds no lock for which a thread that hangs could
  // be waited for. Whoever calls it again only waits.
  bool abandon(Mailboxes &mailboxes, std::chrono::milliseconds limit);

  // Makes each unit of work take `factor` times as long, and ends the pauses of the factor before.
  void throttle(double factor);

  // Disarms all mailboxes, waits for the jobs and ends the threads. Idempotent.
  void close();

 private:
  enum class Phase { prepare, up, down, linear, rows, attend };

  struct Claim {
    bool any = false;
    uint32_t unit = 0;
    uint64_t word = 0;  // what the control word was when there was nothing to claim
  };

  using Time = std::chrono::steady_clock::time_point;

  // Takes the poller role for a thread that is no worker.
  class PollerRole {
   public:
    // Tries until then.
    explicit PollerRole(Engine &engine, Time until = Time::max());
    ~PollerRole();
    PollerRole(const PollerRole &) = delete;
    PollerRole &operator=(const PollerRole &) = delete;

    bool held() const { return held_; }

   private:
    Engine &engine_;
    bool held_ = false;
  };

  void start(const int32_t *cores);
  void stop();
  void work(size_t worker);
  void help(const Record &record);
  void finish_unit(uint32_t unit, size_t worker, double factor);
  Claim claim();
  void run(uint32_t unit, size_t worker);
  void run_throttled(uint32_t unit, size_t worker, double factor);
  void fail(const char *sentence);
  std::pair<uint64_t, uint32_t> progress() const;
  void publish(Phase phase, uint32_t units);
  void advance();
  void prepare_slice();
  void finish_job();
  std::shared_ptr<Record> record_of(const gr_step &step) const;
  uint64_t submit(std::shared_ptr<Record> first, std::shared_ptr<Record> last);
  void enqueue(std::shared_ptr<Record> record);
  void start_job(std::shared_ptr<Record> record);
  void attend(uint64_t seen);
  bool try_poller_role();
  bool serve(size_t looks);
  void forget(Mailboxes &mailboxes);
  void disarm_all();

  const KernelChoice kernels_;
  const uint32_t threads_;  // that work at once
  const bool callers_help_;
  std::chrono::microseconds spin_;
  uint32_t rounds_a_yield_;  // of looking for work, while armed
  std::atomic<double> throttle_{1};

  // The control word: serial number of the phase << 32 | units that nobody has claimed.
  //
  // Units are claimed by compare-and-swap on the whole word, so a claim can only succeed in the phase
  // whose word was read. A phase ends when all its units are finished; while a thread holds an
  // unfinished unit the phase cannot end, and everything below that describes it (marked "phase data") is
  // constant. The thread that finishes the last unit is alone in having a claim on the phase data: it
  // writes them, and publishes them by storing the next control word. A thread that slept through
  // phases or jobs only finds that its word is old.
  alignas(64) std::atomic<uint64_t> control_{0};
  alignas(64) std::atomic<uint32_t> unfinished_{0};  // units of the phase not yet finished
  alignas(64) std::atomic<bool> stop_{false};
  Parking parking_;

  // Phase data.
  Phase phase_ = Phase::prepare;
  uint32_t units_ = 0;
  std::shared_ptr<Record> current_;
  int64_t slice_begin_ = 0, slice_end_ = 0;
  Plan plan_;
  std::vector<std::unique_ptr<GrowingBuffer>> scratch_;  // one a thread; grown while nobody else has a unit
  std::atomic<bool> failed_{false};
  std::mutex failure_mutex_;

  // Of callers one at a time helps, with the first scratch; the others only wait.
  alignas(64) std::atomic<bool> helping_{false};

  // The poller role: one worker at a time looks at requests, so that a request's cache line has one reader. It gives
  // the role up when there is work, and soon when somebody wants to change what is polled.
  alignas(64) std::atomic<bool> polling_{false};
  std::atomic<uint32_t> role_wanted_{0};
  std::atomic<size_t> armed_{0};   // polled_.size(), for everybody
  std::vector<Mailbox *> polled_;  // guarded by the role, as is cursor_
  size_t cursor_ = 0;              // the mailbox to look at next

  std::mutex mutex_;  // guards everything below; taken after the role, never before
  std::condition_variable idle_;
  bool running_ = false;  // a job is current
  bool closing_ = false;
  uint64_t tickets_ = 0;
  JobQueue queue_;
  std::unordered_map<uint64_t, std::shared_ptr<Record>> records_;  // submitted and not yet waited for

  std::vector<std::thread> workers_;
};

}  // namespace greenroom
#endif
