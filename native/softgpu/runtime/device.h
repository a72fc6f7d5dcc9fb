// A device: its memory, its streams and the order between them, and the error that ends it.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "softgpu/runtime/device_memory.h"
#include "softgpu/runtime/error.h"
#include "softgpu/runtime/settings.h"
#include "softgpu/runtime/stream.h"

namespace softgpu {

class Device {
 public:
  Device(int index, int number, char* memory_begin, std::size_t span, std::size_t capacity);

  const int index;   // what the program calls it
  const int number;  // which one of the machine's it is (CUDA_VISIBLE_DEVICES)
  DeviceMemory memory;
  std::atomic<bool> active{false};      // whether the program has used it
  std::atomic<std::uint64_t> peers{0};  // a bit for each device that peer access is enabled to

  // Puts the work at the end of the stream, after all of `after` and after what the legacy default stream's
  // rules demand. Returns the point behind it.
  Point enqueue(Stream& stream, std::unique_ptr<Work> work, std::vector<Point> after = {});

  std::shared_ptr<Stream> create_stream(unsigned flags, int priority);
  const std::shared_ptr<Stream>& legacy_stream() const { return legacy_; }
  std::vector<std::shared_ptr<Stream>> streams();
  void forget(Stream* stream);  // the stream has been destroyed and is empty

  // What is still unfinished, as points to wait for: of all streams; of what a stream's query and
  // synchronisation are about (for the legacy stream also the blocking ones); of all that work put into the
  // stream now would have to wait for.
  std::vector<Point> ends();
  std::vector<Point> ends_of(Stream& stream);
  std::vector<Point> ends_before(Stream& stream);

  // The sticky error: the first failure stays, and every later call fails with it.
  void fail(const CudaFailure& failure);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  void check() const;  // throws it

 private:
  void append_ordered_before(Stream& stream,
                             std::vector<Point>& points);  // by the legacy stream's rules; needs order_

  std::shared_ptr<Stream> legacy_;
  // As in CUDA's driver: who waits for room on a stream keeps all others from putting work on any.
  std::mutex driver_;
  std::mutex order_;  // held while a blocking stream's item is put in order with the legacy stream's
  std::vector<std::shared_ptr<Stream>> blocking_, non_blocking_;
  std::uint64_t next_stream_id_ = 1;

  std::atomic<bool> failed_{false};
  std::mutex failing_;
  CudaFailure failure_{cudaSuccess, ""};
};

// The machine: made at the first call that needs a device, and never destroyed, because stream threads
// outlive main().
struct Machine {
  Machine();
  const MachineSettings settings;
  const AddressSpace addresses;
  std::vector<std::unique_ptr<Device>> devices;
};

Machine& machine();

Device& find_device(int index);          // throws CudaFailure (invalid device)
Device& find_device_number(int number);  // the same by its number on the machine, which other processes use
// Fails the devices whose memory was used where none is allocated.
void report_illegal_accesses();

Device& current_device_state();          // that of this thread, in a state to work
Device* device_of(const void* pointer);  // null: not a device pointer
void use_device(int index);              // makes it this thread's current one

// Blocks the host until the point is reached. Throws the device's sticky error.
void wait_on_host(const Point& point);

// Blocks the host until all of the device's streams are empty: memory must not be pulled from under work that
// still uses it, so what takes memory away does this first, like CUDA.
void synchronize(Device& device);

// Runs the body of a function that works with the current device, which it is given.
template <class Body>
cudaError_t device_call(Body body) noexcept {
  return call([&body] { return body(current_device_state()); });
}

}  // namespace softgpu
