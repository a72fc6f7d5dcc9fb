// Events: a place in a stream and the time at which the stream came by.
#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>

#include "softgpu/runtime/capture.h"
#include "softgpu/runtime/device.h"
#include "softgpu/runtime/handles.h"
#include "softgpu/runtime/shared_recordings.h"
#include "softgpu/runtime/stream_functions.h"

namespace softgpu {
namespace {

// One recording of an event. Who waits for it keeps it: recording the event anew, or destroying it, changes
// nothing for them.
struct Recording {
  Point point;
  std::atomic<std::int64_t> nanoseconds{0};
};

struct Event {
  Event(Device& device, unsigned flags, std::shared_ptr<SharedRecordings> shared = nullptr)
      : device(device), flags(flags), shared(std::move(shared)) {}

  Device& device;
  const unsigned flags;
  const std::shared_ptr<SharedRecordings> shared;  // of an event between processes; it has no others

  std::shared_ptr<Recording> latest() {
    std::lock_guard lock(mutex);
    return recording;
  }
  std::optional<CapturedPoint> latest_capture() {
    std::lock_guard lock(mutex);
    return captured;
  }

  std::mutex mutex;
  std::shared_ptr<Recording> recording;   // null until it is recorded for the first time
  std::optional<CapturedPoint> captured;  // it was recorded last on a stream that captured
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

void record_for_all_processes(SharedRecordings& shared, Stream& stream) {
  const std::uint64_t number = shared.begin();
  try {
    stream.device.enqueue(
        stream, make_work([recordings = shared.shared_from_this(), number] { recordings->finish(number); }));
  } catch (...) {
    shared.finish(number);
    throw;
  }
}

void record(Event& event, Stream& stream) {
  require(&event.device == &stream.device, cudaErrorInvalidResourceHandle,
          "the event belongs to another device than the stream");
  if (captures(stream)) {
    if (event.shared)
      refuse_in_capture(stream, cudaErrorStreamCaptureUnsupported,
                        "no graph records an event between processes");
    std::lock_guard lock(event.mutex);
    event.captured = captured_end(stream);
    return;
  }
  if (event.shared) return record_for_all_processes(*event.shared, stream);
  auto recording = std::make_shared<Recording>();
  std::unique_ptr<Work> work;
  if (!(event.flags & cudaEventDisableTiming)) work = make_work([recording] { stamp(*recording); });
  std::lock_guard lock(event.mutex);
  recording->point = stream.device.enqueue(stream, std::move(work));
  event.recording = std::move(recording);
  event.captured.reset();
}

// No call may ask about what only a graph will do.
void forbid_asking(Event& event) {
  if (const auto captured = event.latest_capture()) refuse_captured_event(*captured);
  forbid_unsafe_call();
}

// What stands outside of all graphs can't tell when a graph's own work has come this far, and the other way
// round.
void refuse_external(Stream& stream) {
  refuse_in_capture(
      stream, cudaErrorNotSupported,
      "softgpu's graphs record no event for others, and wait for none (cudaEventRecordExternal, "
      "cudaEventWaitExternal, torch.cuda.Event(external=True))");
}

cudaError_t wait_for_shared(const std::shared_ptr<SharedRecordings>& shared, Stream& stream) {
  const std::uint64_t number = shared->newest();
  if (!shared->finished(number)) {
    stream.device.enqueue(
        stream, make_work([shared, number, &device = stream.device] { shared->wait(number, device); }));
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace softgpu

using namespace softgpu;

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return device_call([&](Device& device) {
    require(event != nullptr, cudaErrorInvalidValue, "no place to put the new event's handle");
    require((flags & ~unsigned{cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess}) == 0,
            cudaErrorInvalidValue, "unknown event flags");
    require(!(flags & cudaEventInterprocess) || flags & cudaEventDisableTiming, cudaErrorInvalidValue,
            "an event between processes has no timing: cudaEventInterprocess needs cudaEventDisableTiming");
    *event = handles().add(std::make_shared<Event>(
        device, flags, flags & cudaEventInterprocess ? SharedRecordings::create() : nullptr));
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
    const auto on = find_stream(stream);
    if (flags == cudaEventRecordExternal && captures(*on)) refuse_external(*on);
    record(*find_event(event), *on);
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return call([&] {
    const auto event = find_event(handle);
    forbid_asking(*event);
    const auto recording = event->latest();
    const bool reached = event->shared ? event->shared->finished(event->shared->newest())
                                       : !recording || recording->point.reached();
    event->device.check();  // afterwards: a failed device's streams run empty without having done the work
    return reached ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return call([&] {
    const auto event = find_event(handle);
    forbid_asking(*event);
    if (event->shared) event->shared->wait(event->shared->newest(), event->device);
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
      if (const auto captured = event->latest_capture()) refuse_captured_event(*captured);
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
    const auto event = find_event(event_handle);
    if (const auto captured = event->latest_capture()) {
      wait_in_capture(*stream, *captured);
      return cudaSuccess;
    }
    if (captures(*stream)) {
      if (flags == cudaEventWaitExternal) refuse_external(*stream);
      if (event->shared || event->latest()) refuse_in_capture(*stream, cudaErrorStreamCaptureIsolation, "");
      return cudaSuccess;
    }
    if (event->shared) return wait_for_shared(event->shared, *stream);
    const auto recording = event->latest();
    // An event that was never recorded, one that has happened, and one earlier in this very stream need no
    // waiting.
    if (recording && !recording->point.reached() && recording->point.stream != stream) {
      stream->device.enqueue(*stream, nullptr, {recording->point});
    }
    return cudaSuccess;
  });
}

static_assert(sizeof(SharedPiece) <= sizeof(cudaIpcEventHandle_t));

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event_handle) {
  return call([&] {
    require(handle != nullptr, cudaErrorInvalidValue, "no place to put the handle");
    const auto event = find_event(event_handle);
    require(event->shared != nullptr, cudaErrorInvalidResourceHandle,
            "the event was made without cudaEventInterprocess");
    const SharedPiece piece = event->shared->publish(event->device.number);
    std::memset(handle, 0, sizeof *handle);
    std::memcpy(handle, &piece, sizeof piece);
    return cudaSuccess;
  });
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle) {
  return device_call([&](Device&) {
    require(event != nullptr, cudaErrorInvalidValue, "no place to put the event's handle");
    SharedPiece piece;
    std::memcpy(&piece, &handle, sizeof piece);
    require_foreign(piece, SharedPiece::Kind::event);
    Device& device = find_device_number(piece.device);
    *event =
        handles().add(std::make_shared<Event>(device, cudaEventDisableTiming, SharedRecordings::open(piece)));
    return cudaSuccess;
  });
}
