#include "watchdog/event_pool.h"

#include "real_calls.h"

namespace jitckpt::watchdog {
namespace {

// An event belongs to the device that is current when it is made.
std::optional<Event> make_event(int device, unsigned flags) {
  int before = device;
  real::cudaGetDevice(&before);
  if (before != device) real::cudaSetDevice(device);
  cudaEvent_t handle = nullptr;
  const cudaError_t result = real::cudaEventCreateWithFlags(&handle, flags);
  if (before != device) real::cudaSetDevice(before);
  if (result != cudaSuccess) return std::nullopt;
  return Event{handle, device};
}

}  // namespace

std::optional<Event> EventPool::record(cudaStream_t stream, int device) {
  std::optional<Event> event;
  {
    const std::lock_guard lock(mutex_);
    auto& free = free_[device];
    if (!free.empty()) {
      event = free.back();
      free.pop_back();
    }
  }
  const bool clean = real::cudaPeekAtLastError() == cudaSuccess;
  if (!event) event = make_event(device, flags_);
  const bool recorded =
      event && real::cudaEventRecord(static_cast<cudaEvent_t>(event->handle), stream) == cudaSuccess;
  if (recorded) return event;
  if (event) give_back(*event);
  if (clean) real::cudaGetLastError();  // the application did not cause it
  return std::nullopt;
}

void EventPool::give_back(Event event) {
  const std::lock_guard lock(mutex_);
  free_[event.device].push_back(event);
}

}  // namespace jitckpt::watchdog
