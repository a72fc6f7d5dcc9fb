#include "softgpu/runtime/stream_functions.h"

#include <algorithm>
#include <map>

#include "softgpu/runtime/capture.h"
#include "softgpu/runtime/enqueue.h"
#include "softgpu/runtime/handles.h"
#include "softgpu/runtime/process.h"

namespace softgpu {
namespace {

constexpr int least_priority = 0, greatest_priority = -5;

HandleTable<cudaStream_t, Stream>& handles() {
  static auto* const table = new HandleTable<cudaStream_t, Stream>;
  return *table;
}

void destroy(Stream& stream) {
  if (!stream.close()) stream.device.forget(&stream);
}

// A thread's default stream on each device; its work outlives the thread.
struct ThreadStreams {
  std::map<int, std::shared_ptr<Stream>> by_device;

  ~ThreadStreams() {
    if (process_phase() != ProcessPhase::running) return;
    for (const auto& [device, stream] : by_device) destroy(*stream);
  }
};

std::shared_ptr<Stream> per_thread_stream(Device& device) {
  thread_local ThreadStreams streams;
  std::shared_ptr<Stream>& stream = streams.by_device[device.index];
  if (!stream) stream = device.create_stream(cudaStreamDefault, 0);
  return stream;
}

std::unique_ptr<Work> work_of(std::function<cudaError_t()> work) {
  return make_work([work = std::move(work)] {
    if (const cudaError_t error = work(); error != cudaSuccess)
      throw CudaFailure{error, "work on a stream has failed"};
  });
}

bool is_default(cudaStream_t handle) {
  return handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
}

}  // namespace

std::shared_ptr<Stream> find_stream(cudaStream_t handle) {
  if (handle == cudaStreamPerThread) return per_thread_stream(current_device_state());
  if (is_default(handle)) return current_device_state().legacy_stream();
  auto stream = handles().find(handle);
  require(stream != nullptr, cudaErrorInvalidResourceHandle, "there is no such stream (any more)");
  return stream;
}

void destroy_streams_of(Device& device) {
  for (const auto& stream :
       handles().remove_if([&](const Stream& stream) { return &stream.device == &device; })) {
    destroy(*stream);
  }
}

cudaError_t enqueue(cudaStream_t handle, std::function<cudaError_t()> work) {
  return call([&] {
    const auto stream = find_stream(handle);
    stream->device.enqueue(*stream, work_of(std::move(work)));
    return cudaSuccess;
  });
}

std::unique_lock<std::mutex> keep_launch_order() {
  static auto* const mutex = new std::mutex;
  return std::unique_lock(*mutex);
}

cudaError_t find_capture(cudaStream_t handle, bool& captured) {
  return call([&] {
    captured = captures(*find_stream(handle));
    return cudaSuccess;
  });
}

cudaError_t enqueue_captured(const std::vector<cudaStream_t>& handles,
                             std::function<std::function<cudaError_t()>()> make) {
  return call([&] {
    std::vector<std::shared_ptr<Stream>> streams;
    std::vector<Stream*> pointers;
    for (cudaStream_t const handle : handles) {
      streams.push_back(find_stream(handle));
      pointers.push_back(streams.back().get());
    }
    add_node(pointers, cudaGraphNodeTypeKernel, "nccl", [make = std::move(make)] { return work_of(make()); });
    return cudaSuccess;
  });
}

int stream_device(cudaStream_t handle) {
  if (is_default(handle)) return current_device();
  const auto stream = handles().find(handle);
  return stream ? stream->device.index : -1;
}

}  // namespace softgpu

using namespace softgpu;

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return device_call([&](Device& device) {
    require(stream != nullptr, cudaErrorInvalidValue, "no place to put the new stream's handle");
    require((flags & ~unsigned{cudaStreamNonBlocking}) == 0, cudaErrorInvalidValue, "unknown stream flags");
    *stream =
        handles().add(device.create_stream(flags, std::clamp(priority, greatest_priority, least_priority)));
    return cudaSuccess;
  });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return call([&] {
    const auto stream = handles().find(handle);
    require(stream != nullptr, cudaErrorInvalidResourceHandle,
            "there is no such stream (any more) to destroy");
    if (captures(*stream))
      refuse_in_capture(*stream, cudaErrorStreamCaptureUnsupported, "the stream to destroy captures");
    handles().remove(handle);
    destroy(*stream);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return device_call([&](Device&) {
    const auto stream = find_stream(handle);
    forbid_asking(*stream);
    for (const Point& point : stream->device.ends_of(*stream)) wait_on_host(point);
    stream->device.check();
    return cudaSuccess;
  });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return device_call([&](Device&) {
    const auto stream = find_stream(handle);
    forbid_asking(*stream);
    const bool finished = stream->device.ends_of(*stream).empty();
    stream->device.check();  // afterwards: a failed device's streams run empty without having done the work
    return finished ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  return device_call([&](Device&) {
    require_place(priority);
    *priority = find_stream(handle)->priority;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  return device_call([&](Device&) {
    require_place(flags);
    *flags = find_stream(handle)->flags;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  return device_call([&](Device&) {
    require_place(id);
    const auto stream = find_stream(handle);
    // Unique in the process: streams are counted on each device.
    *id = static_cast<unsigned long long>(stream->device.index) << 48 | stream->id;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  return device_call([&](Device&) {
    require_place(device);
    *device = find_stream(handle)->device.index;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return device_call([&](Device&) {
    if (least) *least = least_priority;
    if (greatest) *greatest = greatest_priority;
    return cudaSuccess;
  });
}

namespace {

struct HostFunction final : Work {
  HostFunction(cudaHostFn_t function, void* argument) : function(function), argument(argument) {}
  void run() override { function(argument); }
  bool foreign() const override { return true; }
  cudaHostFn_t function;
  void* argument;
};

struct StreamCallback final : Work {
  StreamCallback(cudaStreamCallback_t callback, cudaStream_t stream, void* argument)
      : callback(callback), stream(stream), argument(argument) {}
  void run() override { callback(stream, cudaSuccess, argument); }
  bool foreign() const override { return true; }
  cudaStreamCallback_t callback;
  cudaStream_t stream;
  void* argument;
};

}  // namespace

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* argument) {
  return device_call([&](Device&) {
    require(function != nullptr, cudaErrorInvalidValue, "no host function to launch");
    const auto stream = find_stream(handle);
    submit(*stream, cudaGraphNodeTypeHost,
           [=] { return std::make_unique<HostFunction>(function, argument); });
    return cudaSuccess;
  });
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback, void* argument,
                                  unsigned flags) {
  return device_call([&](Device&) {
    require(callback != nullptr && flags == 0, cudaErrorInvalidValue, "no callback, or flags other than 0");
    const auto stream = find_stream(handle);
    if (captures(*stream))
      refuse_in_capture(*stream, cudaErrorStreamCaptureUnsupported,
                        "a graph has host functions and no callbacks");
    stream->device.enqueue(*stream, std::make_unique<StreamCallback>(callback, handle, argument));
    return cudaSuccess;
  });
}
