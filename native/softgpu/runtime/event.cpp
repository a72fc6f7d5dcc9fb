// Events: a place in a stream and the time at which the stream came by.
#include <chrono>
#include <mutex>

#include "device.h"
#include "handles.h"
#include "stream_functions.h"

namespace softgpu {
namespace {

// One recording of an event. Who waits for it keeps it: recording the event anew, or destroying it, changes
// nothing for them.
struct Recording {
  Point point;
  std::atomic<std::int64_t> nanoseconds{0};
};

struct Event {
  Event(Device& device, unsigned flags) : device(device), flags(flags) {}

  Device& device;
  const unsigned flags;

  std::shared_ptr<Recording> latest() {
    std::lock_guard lock(mutex);
    return recording;
  }

  std::mutex mutex;
  std::shared_ptr<Recording> recording;  // null until it is recorded for the first time
};

HandleTable<cudaEvent_t, Event>& handles() {
  static auto* const table = new HandleTable<cudaEvent_t, Event>;
  return *table;
}

std::shared_ptr<Event> find_event(cudaEvent_t handle) {
  auto event = handles().find(handle);
  require(event != nullptr, cudaErrorInvalidResourceHandle, "there is no such event (any more)");
  return event;
}

void stamp(Recording& recording) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  recording.nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void record(Event& event, Stream& stream) {
  require(&event.device == &stream.device, cudaErrorInvalidResourceHandle,
          "the event belongs to another device than the stream");
  auto recording = std::make_shared<Recording>();
  std::unique_ptr<Work> work;
  if (!(event.flags & cudaEventDisableTiming)) work = make_work([recording] { stamp(*recording); });
  std::lock_guard lock(event.mutex);
  recording->point = stream.device.enqueue(stream, std::move(work));
  event.recording = std::move(recording);
}

}  // namespace
}  // namespace softgpu

using namespace softgpu;

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return device_call([&](Device& device) {
    require(event != nullptr, cudaErrorInvalidValue, "no place to put the new event's handle");
    require(!(flags & cudaEventInterprocess), cudaErrorNotSupported,
            "softgpu has no events between processes");
    require((flags & ~unsigned{cudaEventBlockingSync | cudaEventDisableTiming}) == 0, cudaErrorInvalidValue,
            "unknown event flags");
    *event = handles().add(std::make_shared<Event>(device, flags));
    return cudaSuccess;
  });
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return call([&] {
    require(handles().remove(event) != nullptr, cudaErrorInvalidResourceHandle,
            "there is no such event (any more) to destroy");
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return device_call([&](Device&) {
    require((flags & ~unsigned{cudaEventRecordExternal}) == 0, cudaErrorInvalidValue, "unknown record flags");
    record(*find_event(event), *find_stream(stream));
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return call([&] {
    const auto event = find_event(handle);
    const auto recording = event->latest();
    const bool reached = !recording || recording->point.reached();
    event->device.check();  // afterwards: a failed device's streams run empty without having done the work
    return reached ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return call([&] {
    const auto event = find_event(handle);
    if (const auto recording = event->latest()) wait_on_host(recording->point);
    event->device.check();
    return cudaSuccess;
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return call([&] {
    require(milliseconds != nullptr, cudaErrorInvalidValue, "no place to put the elapsed time");
    std::int64_t times[2];
    for (int side = 0; side < 2; ++side) {
      const auto event = find_event(side == 0 ? start : end);
      event->device.check();
      require(!(event->flags & cudaEventDisableTiming), cudaErrorInvalidResourceHandle,
              "the event was made with timing disabled");
      const auto recording = event->latest();
      require(recording != nullptr, cudaErrorInvalidResourceHandle, "the event has never been recorded");
      if (!recording->point.reached()) return cudaErrorNotReady;
      times[side] = recording->nanoseconds;
    }
    *milliseconds = static_cast<float>(static_cast<double>(times[1] - times[0]) / 1e6);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned flags) {
  return device_call([&](Device&) {
    require((flags & ~unsigned{cudaEventWaitExternal}) == 0, cudaErrorInvalidValue, "unknown wait flags");
    const auto stream = find_stream(handle);
    const auto recording = find_event(event_handle)->latest();
    // An event that was never recorded, one that has happened, and one earlier in this very stream need no
    // waiting.
    if (recording && !recording->point.reached() && recording->point.stream != stream) {
      stream->device.enqueue(*stream, nullptr, {recording->point});
    }
    return cudaSuccess;
  });
}
