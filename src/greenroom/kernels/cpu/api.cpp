// The C interface: exceptions become statuses and sentences.
#include <chrono>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

#include "engine.h"
#include "greenroom_cpu.h"

#define GR_EXPORT __attribute__((visibility("default")))

struct gr_engine {
  std::shared_ptr<greenroom::Engine> engine;
};

// Keeps the engine's words, though not its threads, until the last mailboxes are gone.
struct gr_mailboxes {
  std::shared_ptr<greenroom::Engine> engine;
  greenroom::Mailboxes boxes;

  ~gr_mailboxes() { engine->disarm(boxes); }
};

namespace {

thread_local std::string last_error;

int32_t failed(const char *sentence) noexcept {
  try {
    last_error = sentence;
  } catch (...) {
    last_error.clear();
  }
  return 1;
}

template <class Body>
int32_t guarded(Body body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc &) {
    return failed("out of memory");
  } catch (const std::exception &error) {
    return failed(error.what());
  } catch (...) {
    return failed("unknown failure");
  }
}

}  // namespace

extern "C" {

GR_EXPORT uint32_t gr_isa_supported(void) { return greenroom::supported_isas(); }

GR_EXPORT int32_t gr_abi_version(void) { return GR_ABI_VERSION; }

GR_EXPORT int32_t gr_engine_create(int32_t threads, const int32_t *cores, int32_t isa, int32_t batch_invariant,
                                   int32_t callers_help, gr_engine **engine) {
  return guarded([&] {
    *engine = nullptr;
    const greenroom::KernelChoice kernels{greenroom::choose_isa(isa), batch_invariant != 0};
    *engine = new gr_engine{std::make_shared<greenroom::Engine>(threads, cores, kernels, callers_help != 0)};
    return 0;
  });
}

GR_EXPORT void gr_engine_destroy(gr_engine *engine) {
  if (engine) engine->engine->close();
  delete engine;
}

GR_EXPORT int32_t gr_engine_isa(const gr_engine *engine) { return engine->engine->isa(); }

GR_EXPORT int32_t gr_submit(gr_engine *engine, const gr_job *job, uint64_t *ticket) {
  return guarded([&] {
    *ticket = engine->engine->submit(*job);
    return 0;
  });
}

GR_EXPORT int32_t gr_linear_submit(gr_engine *engine, const gr_linear *linear, uint64_t *ticket) {
  return guarded([&] {
    *ticket = engine->engine->submit(*linear);
    return 0;
  });
}

GR_EXPORT int32_t gr_attention_submit(gr_engine *engine, const gr_attention *attention, uint64_t *ticket) {
  return guarded([&] {
    *ticket = engine->engine->submit(*attention);
    return 0;
  });
}

GR_EXPORT int32_t gr_sequence_submit(gr_engine *engine, const gr_step *steps, int32_t count, uint64_t *ticket) {
  return guarded([&] {
    *ticket = engine->engine->submit(steps, count);
    return 0;
  });
}

GR_EXPORT void gr_norm(int32_t isa, int32_t dtype, const void *x, const void *weight, void *y, int64_t rows,
                       int32_t width, float epsilon) {
  greenroom::choose_row_kernel(static_cast<gr_isa>(isa), dtype)->norm(x, weight, y, rows, width, epsilon);
}

GR_EXPORT void gr_turn(int32_t isa, int32_t dtype, const void *x, const void *cosines, const void *sines, void *y,
                       int64_t heads, int64_t tokens, int32_t width) {
  greenroom::choose_row_kernel(static_cast<gr_isa>(isa), dtype)->turn(x, cosines, sines, y, heads, tokens, width);
}

GR_EXPORT void gr_choose(int32_t isa, int32_t dtype, const void *logits, int64_t tokens, int32_t experts,
                         int32_t top_k, int32_t normalise, float *weights, int64_t *ids) {
  greenroom::choose_row_kernel(static_cast<gr_isa>(isa), dtype)
      ->choose(logits, tokens, experts, top_k, normalise != 0, weights, ids);
}

GR_EXPORT int32_t gr_wait(gr_engine *engine, uint64_t ticket, int64_t limit_ms, int32_t *late) {
  return guarded([&] {
    *late = 0;
    const std::optional<std::string> error = engine->engine->wait(ticket, std::chrono::milliseconds(limit_ms));
    *late = !error;
    return error && !error->empty() ? failed(error->c_str()) : 0;
  });
}

GR_EXPORT int32_t gr_engine_throttle(gr_engine *engine, double factor) {
  return guarded([&] {
    engine->engine->throttle(factor);
    return 0;
  });
}

GR_EXPORT int32_t gr_mailboxes_create(gr_engine *engine, const gr_mailbox *boxes, int32_t count,
                                      gr_mailboxes **mailboxes) {
  return guarded([&] {
    *mailboxes = nullptr;
    *mailboxes = new gr_mailboxes{engine->engine, {boxes, count}};
    return 0;
  });
}

GR_EXPORT void gr_mailboxes_destroy(gr_mailboxes *mailboxes) { delete mailboxes; }

GR_EXPORT int32_t gr_mailboxes_arm(gr_mailboxes *mailboxes) {
  return guarded([&] {
    mailboxes->engine->arm(mailboxes->boxes);
    return 0;
  });
}

GR_EXPORT int32_t gr_mailboxes_disarm(gr_mailboxes *mailboxes, int32_t *failed) {
  return guarded([&] {
    mailboxes->engine->disarm(mailboxes->boxes);
    *failed = mailboxes->boxes.has_failure();
    return 0;
  });
}

GR_EXPORT int32_t gr_mailboxes_failure(gr_mailboxes *mailboxes, int32_t *index) {
  return guarded([&] {
    std::string sentence;
    return mailboxes->boxes.take_failure(index, &sentence) ? failed(sentence.c_str()) : 0;
  });
}

GR_EXPORT int32_t gr_mailboxes_pending(const gr_mailboxes *mailboxes) { return mailboxes->boxes.pending(); }

GR_EXPORT int32_t gr_mailboxes_abandon(gr_mailboxes *mailboxes, int64_t limit_ms, int32_t *late) {
  return guarded([&] {
    *late = 1;
    *late = !mailboxes->engine->abandon(mailboxes->boxes, std::chrono::milliseconds(limit_ms));
    return 0;
  });
}

GR_EXPORT const char *gr_last_error(void) { return last_error.c_str(); }

}  // extern "C"
