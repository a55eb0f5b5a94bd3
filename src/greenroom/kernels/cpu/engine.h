// Worker threads, the queue of jobs, and how the threads share the work of one job.
#ifndef GREENROOM_ENGINE_H
#define GREENROOM_ENGINE_H

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "parking.h"
#include "plan.h"

namespace greenroom {

class Engine {
 public:
  // Throws std::invalid_argument and std::system_error. cores: null or one number a thread.
  Engine(int32_t threads, const int32_t *cores, gr_isa isa);
  ~Engine();
  Engine(const Engine &) = delete;
  Engine &operator=(const Engine &) = delete;

  gr_isa isa() const { return isa_; }

  uint64_t submit(const gr_job &job);

  // Empty when the job succeeded, otherwise what went wrong.
  std::string wait(uint64_t ticket);

 private:
  // What a submitter, the workers and the waiter share about one job.
  struct Record {
    gr_job job;
    gr_format format;
    std::string error;              // written by workers under failure_mutex_, read once done is set
    std::atomic<bool> done{false};  // set by the worker that ends the job
    Parking parking;
  };

  enum class Phase { prepare, up, down };

  struct Claim {
    bool any = false;
    uint32_t unit = 0;
    uint64_t word = 0;  // what the control word was when there was nothing to claim
  };

  void start(const int32_t *cores);
  void stop();
  void work(size_t worker);
  Claim claim();
  void run(uint32_t unit, size_t worker);
  void fail(const char *sentence);
  void publish(Phase phase, uint32_t units);
  void advance();
  void prepare_slice();
  void finish_job();
  void start_job(std::shared_ptr<Record> record);

  const gr_isa isa_;
  const uint32_t threads_;
  std::chrono::microseconds spin_;

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
  std::vector<std::unique_ptr<GrowingBuffer>> scratch_;  // one a worker; grown while nobody else has a unit
  std::atomic<bool> failed_{false};
  std::mutex failure_mutex_;

  std::mutex mutex_;  // guards everything below
  std::condition_variable idle_;
  bool running_ = false;  // a job is current
  uint64_t tickets_ = 0;
  std::deque<std::shared_ptr<Record>> queue_;
  std::unordered_map<uint64_t, std::shared_ptr<Record>> records_;  // submitted and not yet waited for

  std::vector<std::thread> workers_;
};

}  // namespace greenroom
#endif
