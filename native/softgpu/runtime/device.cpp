#include "softgpu/runtime/device.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "softgpu/runtime/enqueue.h"
#include "softgpu/runtime/fault_control.h"
#include "softgpu/runtime/fault_registry.h"
#include "softgpu/runtime/illegal_access.h"
#include "softgpu/runtime/process.h"

namespace softgpu {
namespace {

thread_local int current_index = 0;

// The driver goes before the program's libraries do: streams begin nothing more (see Stream::execute).
// Kernels that run right now get a moment to end, as they use code and data of libraries that are destroyed
// next.
void stop_at_exit() {
  close_fault_control();
  constexpr auto grace = std::chrono::seconds(2);
  const auto deadline = std::chrono::steady_clock::now() + grace;
  for (const auto& device : machine().devices) {
    for (const auto& stream : device->streams()) {
      while (stream->runs_foreign_code() && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }
}

void append_unreached(std::vector<Point>& points, Point point) {
  if (!point.reached()) points.push_back(std::move(point));
}

}  // namespace

Device::Device(int index, int number, char* memory_begin, std::size_t span, std::size_t capacity)
    : index(index),
      number(number),
      memory(memory_begin, span, capacity),
      legacy_(std::make_shared<Stream>(*this, cudaStreamDefault, 0, 0)) {}

void Device::append_ordered_before(Stream& stream, std::vector<Point>& points) {
  if (stream.flags & cudaStreamNonBlocking) return;
  if (&stream != legacy_.get()) {
    append_unreached(points, legacy_->tail());
  } else {
    for (const auto& other : blocking_) append_unreached(points, other->tail());
  }
}

Point Device::enqueue(Stream& stream, std::unique_ptr<Work> work, std::vector<Point> after) {
  check();
  const std::lock_guard driver(driver_);
  stream.await_room();
  check();
  std::unique_lock lock(order_, std::defer_lock);
  if (!(stream.flags & cudaStreamNonBlocking)) lock.lock();
  append_ordered_before(stream, after);
  return {stream.shared_from_this(), stream.append(std::move(work), std::move(after))};
}

std::shared_ptr<Stream> Device::create_stream(unsigned flags, int priority) {
  const std::lock_guard driver(driver_);
  std::lock_guard lock(order_);
  auto stream = std::make_shared<Stream>(*this, flags, priority, next_stream_id_++);
  (flags & cudaStreamNonBlocking ? non_blocking_ : blocking_).push_back(stream);
  return stream;
}

std::vector<std::shared_ptr<Stream>> Device::streams() {
  std::lock_guard lock(order_);
  std::vector<std::shared_ptr<Stream>> all{legacy_};
  all.insert(all.end(), blocking_.begin(), blocking_.end());
  all.insert(all.end(), non_blocking_.begin(), non_blocking_.end());
  return all;
}

void Device::forget(Stream* stream) {
  std::lock_guard lock(order_);
  for (auto* list : {&blocking_, &non_blocking_}) {
    std::erase_if(*list, [stream](const auto& other) { return other.get() == stream; });
  }
}

std::vector<Point> Device::ends() {
  std::vector<Point> points;
  for (const auto& stream : streams()) append_unreached(points, stream->tail());
  return points;
}

std::vector<Point> Device::ends_of(Stream& stream) {
  if (&stream == legacy_.get()) return ends_before(stream);
  std::vector<Point> points;
  append_unreached(points, stream.tail());
  return points;
}

std::vector<Point> Device::ends_before(Stream& stream) {
  std::vector<Point> points;
  std::lock_guard lock(order_);
  append_unreached(points, stream.tail());
  append_ordered_before(stream, points);
  return points;
}

void Device::fail(const CudaFailure& failure) {
  {
    std::lock_guard lock(failing_);
    if (failed()) return;
    failure_ = failure;
    failed_.store(true, std::memory_order_release);
  }
  std::fprintf(stderr, "softgpu: device %d has failed (%s)%s%s\n", index, cudaGetErrorName(failure.error),
               failure.text.empty() ? "" : ": ", failure.text.c_str());
  for (const auto& stream : streams()) stream->notice_failure();
}

void Device::check() const {
  if (failed()) throw failure_;
}

Machine::Machine() : settings(read_settings()), addresses(settings.devices.size(), settings.memory) {
  for (std::size_t index = 0; index < settings.devices.size(); ++index) {
    devices.push_back(std::make_unique<Device>(static_cast<int>(index), settings.devices[index],
                                               addresses.device_begin(index), addresses.span(),
                                               settings.memory));
  }
  arm_faults_of_environment();
  open_fault_control();
  enter_running(stop_at_exit);
}

Machine& machine() {
  static Machine* const the_machine = [] {
    try {
      return new Machine;
    } catch (const CudaFailure& failure) {
      std::fprintf(stderr, "softgpu: %s\n", failure.text.c_str());
      throw;
    }
  }();
  return *the_machine;
}

Device& find_device(int index) {
  const auto& devices = machine().devices;
  require(!devices.empty(), cudaErrorNoDevice, "SOFTGPU_DEVICES and CUDA_VISIBLE_DEVICES leave no device");
  if (index < 0 || static_cast<std::size_t>(index) >= devices.size()) {
    throw CudaFailure{cudaErrorInvalidDevice,
                      "device " + std::to_string(index) + " of " + std::to_string(devices.size()) +
                          " devices: set SOFTGPU_DEVICES to as many as the program uses, and "
                          "CUDA_VISIBLE_DEVICES to no fewer"};
  }
  return *devices[static_cast<std::size_t>(index)];
}

Device& find_device_number(int number) {
  for (const auto& device : machine().devices) {
    if (device->number == number) return *device;
  }
  throw CudaFailure{cudaErrorInvalidDevice, "it lies on device " + std::to_string(number) +
                                                " of the machine, which this process does not see "
                                                "(CUDA_VISIBLE_DEVICES, SOFTGPU_DEVICES)"};
}

void report_illegal_accesses() {
  if (!any_illegal_access()) return;
  for (const auto& device : machine().devices) {
    const auto index = static_cast<std::size_t>(device->index);
    const std::ptrdiff_t offset = illegal_access(index);
    if (offset < 0 || device->failed()) continue;
    char text[128];
    std::snprintf(text, sizeof text,
                  "work on a stream used the address %p, where no memory is allocated (any more)",
                  static_cast<const void*>(machine().addresses.device_begin(index) + offset));
    device->fail({cudaErrorIllegalAddress, text});
  }
}

Device& current_device_state() {
  Device& device = find_device(current_index);
  report_illegal_accesses();
  device.active.store(true, std::memory_order_relaxed);
  device.check();
  return device;
}

Device* device_of(const void* pointer) {
  const int index = machine().addresses.find(pointer);
  return index < 0 ? nullptr : machine().devices[static_cast<std::size_t>(index)].get();
}

int current_device() { return current_index; }

void use_device(int index) { current_index = index; }

bool device_usable(int device) {
  return !find_device(device).failed() && process_phase() == ProcessPhase::running;
}

void fail_device(int device, cudaError_t error) { find_device(device).fail({error, ""}); }

void wait_on_host(const Point& point) {
  if (!point.reached()) point.stream->wait(point.ticket);
  if (point.stream) point.stream->device.check();
}

void synchronize(Device& device) {
  for (const Point& point : device.ends()) wait_on_host(point);
}

}  // namespace softgpu
