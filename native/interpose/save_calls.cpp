#include "interpose/save_calls.h"

#include <cstdio>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "real_calls.h"
#include "watchdog/device.h"

namespace jitckpt::interpose {
namespace {

struct SaveStreams {
  std::mutex mutex;
  std::unordered_map<int, cudaStream_t> by_device;
  std::unordered_set<cudaEvent_t> events;  // recorded on them
};
SaveStreams& save_streams() {
  static auto* const streams = new SaveStreams;
  return *streams;
}

struct Postponed {
  int device;
  std::function<void()> free;
};
struct PostponedFrees {
  std::mutex mutex;
  std::vector<Postponed> frees;
};
PostponedFrees& postponed_frees() {
  static auto* const frees = new PostponedFrees;
  return *frees;
}

int current_device() {
  int device = 0;
  real::cudaGetDevice(&device);
  return device;
}

void postpone(int device, std::function<void()> free) {
  PostponedFrees& postponed = postponed_frees();
  const std::lock_guard lock(postponed.mutex);
  postponed.frees.push_back({device, std::move(free)});
}

thread_local const char* refused_call = nullptr;

}  // namespace

ncclResult_t refuse(const char* call) {
  refused_call = call;
  return ncclInvalidUsage;
}

namespace save {

void end() {
  SaveStreams& streams = save_streams();
  const std::lock_guard lock(streams.mutex);
  for (const auto& [device, handle] : streams.by_device) {
    postpone(device, [stream = handle] { real::cudaStreamDestroy(stream); });
  }
  streams.by_device.clear();
  streams.events.clear();
}

cudaStream_t stream() {
  const int device = current_device();
  SaveStreams& streams = save_streams();
  const std::lock_guard lock(streams.mutex);
  cudaStream_t& handle = streams.by_device[device];
  if (!handle) {
    // Non-blocking: the legacy default stream must not order itself against it.
    const cudaError_t result = real::cudaStreamCreateWithPriority(&handle, cudaStreamNonBlocking, 0);
    if (result != cudaSuccess) {
      std::fprintf(stderr, "jitckpt: no stream for the save on device %d (%s): its copies may block.\n",
                   device, real::cudaGetErrorString(result));
    }
  }
  return handle;
}

cudaError_t synchronised(cudaError_t enqueued) {
  return enqueued == cudaSuccess ? real::cudaStreamSynchronize(stream()) : enqueued;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* func, void** args) {
  cudaLaunchConfig_t own = *config;
  own.stream = stream();
  return real::cudaLaunchKernelExC(&own, func, args);
}

cudaError_t cudaDeviceSynchronize() { return real::cudaStreamSynchronize(stream()); }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  const cudaError_t result = real::cudaEventRecord(event, stream());
  SaveStreams& streams = save_streams();
  const std::lock_guard lock(streams.mutex);
  streams.events.insert(event);
  return result;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t, unsigned int flags) {
  const cudaError_t result = real::cudaEventRecordWithFlags(event, stream(), flags);
  SaveStreams& streams = save_streams();
  const std::lock_guard lock(streams.mutex);
  streams.events.insert(event);
  return result;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t event, unsigned int flags) {
  {
    SaveStreams& streams = save_streams();
    const std::lock_guard lock(streams.mutex);
    // The device is at rest: an event of the application's has either finished or never will.
    if (!streams.events.contains(event)) return cudaSuccess;
  }
  return real::cudaStreamWaitEvent(stream(), event, flags);
}

const char* ncclGetLastError(ncclComm_t comm) {
  if (!refused_call) return real::ncclGetLastError(comm);
  static thread_local char text[160];
  std::snprintf(
      text, sizeof text,
      "%s was called inside save_checkpoint: no collective may run there, the other ranks can't answer",
      refused_call);
  return text;
}

}  // namespace save

namespace hold {

cudaError_t cudaFree(void* pointer) {
  postpone(current_device(), [pointer] { real::cudaFree(pointer); });
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* pointer) {
  postpone(current_device(), [pointer] { real::cudaFreeHost(pointer); });
  return cudaSuccess;
}

// The poller asks all streams while the gate is closed: they must be there.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  postpone(current_device(), [stream] {
    observe::cudaStreamDestroy(stream);
    real::cudaStreamDestroy(stream);
  });
  return cudaSuccess;
}

void free_postponed() {
  std::vector<Postponed> frees;
  {
    PostponedFrees& postponed = postponed_frees();
    const std::lock_guard lock(postponed.mutex);
    frees.swap(postponed.frees);
  }
  for (const Postponed& postponed : frees) {
    watchdog::use_device(postponed.device);
    postponed.free();
  }
}

}  // namespace hold
}  // namespace jitckpt::interpose
