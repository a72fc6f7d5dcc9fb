#include "watchdog/device.h"

#include "real_calls.h"

namespace jitckpt::watchdog {
namespace {

// cudaErrorNotReady becomes the thread's last error, and torch takes that for a failed launch. An error that
// was there before is the caller's.
template <typename Question>
cudaError_t ask(const Question& question) {
  const bool clean = real::cudaPeekAtLastError() == cudaSuccess;
  const cudaError_t answer = question();
  if (answer != cudaSuccess && clean) real::cudaGetLastError();
  return answer;
}

cudaError_t query(Event event) {
  return ask([&] { return real::cudaEventQuery(static_cast<cudaEvent_t>(event.handle)); });
}

}  // namespace

void use_device(int device) {
  static thread_local int current = -1;
  if (current == device) return;
  if (real::cudaSetDevice(device) == cudaSuccess) current = device;
}

bool finished(Event event) { return query(event) == cudaSuccess; }

bool is_pending(Event event) { return query(event) == cudaErrorNotReady; }

std::optional<double> seconds_between(Event from, Event to) {
  float milliseconds = 0;
  const auto handle = [](Event event) { return static_cast<cudaEvent_t>(event.handle); };
  if (ask([&] { return real::cudaEventElapsedTime(&milliseconds, handle(from), handle(to)); }) != cudaSuccess)
    return std::nullopt;
  return milliseconds / 1e3;
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return ask([&] { return real::cudaStreamIsCapturing(stream, &status); }) != cudaSuccess ||
         status != cudaStreamCaptureStatusNone;
}

StreamState state_of(cudaStream_t stream) {
  if (is_capturing(stream)) return StreamState::capturing;
  // Any error but "not ready" means that nothing will move there any more.
  return ask([&] { return real::cudaStreamQuery(stream); }) == cudaErrorNotReady ? StreamState::busy
                                                                                 : StreamState::idle;
}

void leave_captures_alone() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  ask([&] { return real::cudaThreadExchangeStreamCaptureMode(&mode); });
}

}  // namespace jitckpt::watchdog
