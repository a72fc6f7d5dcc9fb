#include "softgpu/nccl/launch.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "softgpu/nccl/failure.h"
#include "softgpu/nccl/progress.h"
#include "softgpu/nccl/thread.h"
#include "softgpu/runtime/enqueue.h"
#include "softgpu/runtime/fault_registry.h"

namespace softgpu::nccl {
namespace {

// What a launch has to do on one communicator.
class Part {
 public:
  explicit Part(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)), number_(communicator_->next_launch()) {}
  Part(Part&&) = default;
  ~Part() {  // dropped with its stream, when the device is lost
    if (communicator_ && !ended_) communicator_->end_launch(false);
  }

  const Communicator* communicator() const { return communicator_.get(); }
  void add(const Operation& operation) { operations_.push_back(operation); }

  void run() {
    const bool has_turn = communicator_->wait_for_turn(number_);
    if (has_turn) run_operations(*communicator_, operations_);
    communicator_->end_launch(has_turn);
    ended_ = true;
  }

 private:
  std::shared_ptr<Communicator> communicator_;
  uint64_t number_;
  std::vector<Operation> operations_;
  bool ended_ = false;
};

// Work that several streams come to: the last of them does it, and then they all go on.
class Launch {
 public:
  Launch(std::vector<Part> parts, size_t streams) : parts_(std::move(parts)), missing_(streams) {}

  void arrive() {
    std::unique_lock lock(mutex_);
    if (--missing_ == 0) {
      lock.unlock();
      run();
      lock.lock();
      finished_ = true;
      changed_.notify_all();
    }
    while (!finished_ && !should_stop()) changed_.wait_for(lock, device_poll);
  }

  // One of the streams will not come.
  void cancel() {
    const std::lock_guard lock(mutex_);
    finished_ = true;
    changed_.notify_all();
  }

 private:
  // Each communicator moves on by itself: one that hangs must not hold up another that shares its stream.
  void run() {
    std::vector<std::thread> threads;
    for (size_t i = 1; i < parts_.size(); ++i) {
      threads.push_back(start_thread([part = &parts_[i]] { part->run(); }));
    }
    parts_[0].run();
    for (std::thread& thread : threads) thread.join();
  }

  bool should_stop() const {
    return std::any_of(parts_.begin(), parts_.end(),
                       [](const Part& part) { return part.communicator()->should_stop(); });
  }

  std::vector<Part> parts_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t missing_;
  bool finished_ = false;
};

// The null streams of two devices are two streams.
struct Stream {
  explicit Stream(const Call& call) : stream(call.stream), device(call.communicator->device) {}
  cudaStream_t stream;
  int device;
  bool operator==(const Stream&) const = default;
};

// Makes the device that null streams belong to the current one, as NCCL does.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) : device_(device), before_(current_device()) {
    if (device_ != before_) cudaSetDevice(device_);
  }
  ~CurrentDevice() {
    if (device_ != before_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;

 private:
  const int device_, before_;
};

// Groups calls that share a communicator or a stream, directly or through others. Keeps their order.
std::vector<std::vector<Call>> partition(const std::vector<Call>& calls) {
  std::vector<std::vector<Call>> groups;
  for (const Call& call : calls) {
    std::vector<Call> joined;
    std::erase_if(groups, [&](const std::vector<Call>& group) {
      const bool shares = std::any_of(group.begin(), group.end(), [&](const Call& other) {
        return other.communicator == call.communicator || Stream(other) == Stream(call);
      });
      if (shares) joined.insert(joined.end(), group.begin(), group.end());
      return shares;
    });
    joined.push_back(call);
    groups.push_back(std::move(joined));
  }
  return groups;
}

void check_stream(const Call& call) {
  const CurrentDevice current(call.communicator->device);
  const int device = stream_device(call.stream);
  if (device < 0) throw NcclFailure(ncclInvalidArgument, "There is no such stream.");
  if (device != call.communicator->device) {
    throw NcclFailure(ncclInvalidUsage, "The stream belongs to device ", device,
                      ", the communicator to device ", call.communicator->device,
                      ". Give each communicator a stream of its own device.");
  }
}

// Calls of one communicator each; they take their places in the order of its launches.
std::vector<Part> parts_of(const std::vector<Call>& calls) {
  std::vector<Part> parts;
  for (const Call& call : calls) {
    const auto known = std::find_if(parts.begin(), parts.end(), [&](const Part& part) {
      return part.communicator() == call.communicator.get();
    });
    Operation operation = call.operation;
    operation.fault = fault_at(FaultPoint::collective);
    (known == parts.end() ? parts.emplace_back(call.communicator) : *known).add(operation);
  }
  return parts;
}

std::vector<Stream> streams_of(const std::vector<Call>& calls) {
  std::vector<Stream> streams;
  for (const Call& call : calls) {
    if (std::find(streams.begin(), streams.end(), Stream(call)) == streams.end()) streams.emplace_back(call);
  }
  return streams;
}

void require_device(cudaError_t error, const Stream& stream) {
  if (error == cudaSuccess) return;
  throw NcclFailure(ncclUnhandledCudaError, "Device ", stream.device, " takes no more work (CUDA error ",
                    static_cast<int>(error), ").");
}

// Whether a graph captures it: then there is nothing to enqueue.
bool capture_group(const std::vector<Call>& calls, const std::vector<Stream>& streams) {
  const bool captured = std::any_of(streams.begin(), streams.end(), [](const Stream& stream) {
    const CurrentDevice current(stream.device);
    bool captures = false;
    require_device(find_capture(stream.stream, captures), stream);
    return captures;
  });
  if (!captured) return false;
  std::vector<cudaStream_t> handles;
  for (const Stream& stream : streams) handles.push_back(stream.stream);
  const CurrentDevice current(streams[0].device);
  const cudaError_t error = enqueue_captured(handles, [calls] {
    const auto launch = std::make_shared<Launch>(parts_of(calls), 1);
    return [launch] {
      launch->arrive();
      return cudaSuccess;
    };
  });
  if (error != cudaSuccess) {
    throw NcclFailure(ncclInvalidUsage, "The call can't become part of a CUDA graph (CUDA error ",
                      static_cast<int>(error), "): all its streams must be captured into the same one.");
  }
  return true;
}

void enqueue_group(const std::vector<Call>& calls) {
  const std::vector<Stream> streams = streams_of(calls);
  if (capture_group(calls, streams)) return;
  const auto launch = std::make_shared<Launch>(parts_of(calls), streams.size());
  for (const Stream& stream : streams) {
    const CurrentDevice current(stream.device);
    const cudaError_t error = enqueue(stream.stream, [launch] {
      launch->arrive();
      return cudaSuccess;
    });
    if (error != cudaSuccess) launch->cancel();
    require_device(error, stream);
  }
}

}  // namespace

void launch(const std::vector<Call>& calls) {
  for (const Call& call : calls) check_stream(call);
  // Numbers of launches are in the order of the streams' queues.
  const auto order = keep_launch_order();
  for (const std::vector<Call>& group : partition(calls)) enqueue_group(group);
}

}  // namespace softgpu::nccl
