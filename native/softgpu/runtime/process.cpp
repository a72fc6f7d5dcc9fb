#include "softgpu/runtime/process.h"

#include <pthread.h>

#include <atomic>
#include <cstdlib>

#include "softgpu/runtime/error.h"

namespace softgpu {
namespace {

std::atomic<ProcessPhase> phase{ProcessPhase::fresh};
void (*exit_handler)() = nullptr;

}  // namespace

ProcessPhase process_phase() { return phase; }

void enter_running(void (*at_exit)()) {
  exit_handler = at_exit;
  phase = ProcessPhase::running;
  pthread_atfork(nullptr, nullptr, [] { phase = ProcessPhase::forked; });
  std::atexit([] {
    if (process_phase() != ProcessPhase::running) return;
    phase = ProcessPhase::exiting;
    exit_handler();
  });
}

void check_process() {
  switch (process_phase()) {
    case ProcessPhase::forked:
      throw CudaFailure{
          cudaErrorInitializationError,
          "a forked process can't use the device that its parent opened before; start it with spawn instead"};
    case ProcessPhase::exiting:
      throw CudaFailure{cudaErrorCudartUnloading, ""};
    case ProcessPhase::fresh:
    case ProcessPhase::running:
      return;
  }
}

}  // namespace softgpu
