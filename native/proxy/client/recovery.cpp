// A server that has died is replaced: the new one makes what there was at the beginning of the minibatch,
// gets the memory of then, and reads the log from there.
#include <cstdio>
#include <cstring>
#include <exception>
#include <set>

#include "connection.h"
#include "jitckpt_proxy.h"
#include "proxy_by_hand.h"
#include "thread.h"

namespace jitckpt::proxy::client {
namespace {

// A failure that comes back each time the calls are made again is the program's own, or the machine's.
constexpr int most_recoveries = 2;  // in one minibatch

template <class Arguments>
LogWriter::Apart apart(Call call, int32_t device, const Arguments& arguments) {
  const Bytes bytes = bytes_of(arguments);
  return {static_cast<uint16_t>(call), device, {bytes.begin(), bytes.end()}};
}

// The thread's device, for a moment.
class OnDevice {
 public:
  explicit OnDevice(int32_t device) : before_(this_thread().device) { this_thread().device = device; }
  ~OnDevice() { this_thread().device = before_; }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int32_t before_;
};

cudaError_t synchronize(const std::vector<Allocation>& allocations) {
  std::set<int32_t> devices;
  for (const Allocation& allocation : allocations) devices.insert(allocation.device);
  for (const int32_t device : devices) {
    const OnDevice on_device(device);
    if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t Connection::keep() {
  writer_.keep_nothing();  // the images are overwritten
  recoveries_ = 0;
  objects_.forget_ended();
  for (void* const freed : freed_pinned_.take()) pinned_.release(freed);
  if (const std::string obstacle = objects_.obstacle(); !obstacle.empty()) {
    return cudaError_t(fail(Library::cudart, cudaErrorNotSupported,
                            "the device proxy can't bring this process's device back: " + obstacle));
  }
  const std::vector<Allocation> allocations = objects_.allocations();
  if (const cudaError_t error = synchronize(allocations); error != cudaSuccess) return error;
  std::map<uint64_t, Image> images;
  for (const Allocation& allocation : allocations) {
    Image image{allocation, nullptr};
    const auto before = images_.find(allocation.address);
    if (before != images_.end() && before->second.allocation.bytes == allocation.bytes) {
      image.copy = before->second.copy;
      images_.erase(before);
    } else {
      image.copy = pinned_.allocate(allocation.bytes);
    }
    if (!image.copy) {
      return cudaError_t(fail(Library::cudart, cudaErrorMemoryAllocation,
                              "no room for copies of the device's memory: raise JITCKPT_PROXY_PINNED_BYTES"));
    }
    images.emplace(allocation.address, image);
    const OnDevice on_device(allocation.device);
    const wire::copy arguments{reinterpret_cast<uint64_t>(image.copy), allocation.address, allocation.bytes,
                               0, cudaMemcpyDeviceToHost};
    if (const auto error = tell<cudaError_t>(Call::copy, arguments); error != cudaSuccess) return error;
  }
  for (const auto& [address, old] : images_) pinned_.release(old.copy);
  images_ = std::move(images);
  if (const cudaError_t error = synchronize(allocations); error != cudaSuccess) return error;
  writer_.keep();
  return cudaSuccess;
}

// With mutex_ held.
bool Connection::recover() {
  if (!writer_.keeps() || ++recoveries_ > most_recoveries || !objects_.obstacle().empty()) return false;
  std::vector<LogWriter::Apart> calls = objects_.creations(writer_.first_kept());
  std::set<int32_t> devices;
  for (const auto& [address, image] : images_) {
    const Allocation& allocation = image.allocation;
    const wire::copy arguments{address, reinterpret_cast<uint64_t>(image.copy), allocation.bytes, 0,
                               cudaMemcpyHostToDevice};
    calls.push_back(apart(Call::copy, allocation.device, arguments));
    devices.insert(allocation.device);
  }
  for (const int32_t device : devices)
    calls.push_back(apart(Call::cudaDeviceSynchronize, device, wire::cudaDeviceSynchronize{}));
  const auto start = writer_.write_apart(calls);
  if (!start) return false;
  Control& control = log_.control();
  control.start = *start;
  control.read = 0;
  control.reader_sleeps = 0;
  for (AsynchronousError& error : control.errors) error.origin = 0;
  try {
    const std::string death = server_->end();
    server_ = std::make_unique<ServerProcess>(log_file_.descriptor(), pinned_.file().descriptor());
    std::fprintf(stderr,
                 "jitckpt: the device proxy's server %s; process %d takes over and makes its calls again.\n",
                 death.c_str(), server_->id());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "jitckpt: %s\n", error.what());
    return false;
  }
  return true;
}

}  // namespace jitckpt::proxy::client

using namespace jitckpt::proxy::client;

int jitckpt_proxy_keep(void) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::cudart, result);
  return connection ? connection->keep() : result;
}

int jitckpt_proxy_server(void) { return Connection::usable() ? Connection::server_of_process() : 0; }
