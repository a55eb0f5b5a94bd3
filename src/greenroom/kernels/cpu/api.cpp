// The C interface: exceptions become statuses and sentences.
#include <new>
#include <stdexcept>
#include <string>

#include "engine.h"
#include "greenroom_cpu.h"

#define GR_EXPORT __attribute__((visibility("default")))

struct gr_engine {
  greenroom::Engine engine;
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

GR_EXPORT int32_t gr_engine_create(int32_t threads, const int32_t *cores, int32_t isa, gr_engine **engine) {
  return guarded([&] {
    *engine = nullptr;
    *engine = new gr_engine{{threads, cores, greenroom::choose_isa(isa)}};
    return 0;
  });
}

GR_EXPORT void gr_engine_destroy(gr_engine *engine) { delete engine; }

GR_EXPORT int32_t gr_engine_isa(const gr_engine *engine) { return engine->engine.isa(); }

GR_EXPORT int32_t gr_submit(gr_engine *engine, const gr_job *job, uint64_t *ticket) {
  return guarded([&] {
    *ticket = engine->engine.submit(*job);
    return 0;
  });
}

GR_EXPORT int32_t gr_wait(gr_engine *engine, uint64_t ticket) {
  return guarded([&] {
    const std::string error = engine->engine.wait(ticket);
    return error.empty() ? 0 : failed(error.c_str());
  });
}

GR_EXPORT const char *gr_last_error(void) { return last_error.c_str(); }

}  // extern "C"
