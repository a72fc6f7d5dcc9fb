// Images: copies of the device's memory as it is between two minibatches, in memory that outlives this
// process.
#include "proxy/server/images.h"

#include <chrono>
#include <future>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "proxy/server/failure.h"
#include "proxy/server/server.h"
#include "proxy/server/services.h"
#include "real_calls.h"

namespace jitckpt::proxy {

cudaError_t synchronize(const std::set<int32_t>& devices) {
  for (const int32_t device : devices) {
    choose_device(device);
    if (const cudaError_t error = real::cudaDeviceSynchronize(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t come_to_rest(const std::set<int32_t>& devices, Server& server) {
  const auto task =
      std::make_shared<std::packaged_task<cudaError_t()>>([devices] { return synchronize(devices); });
  std::future<cudaError_t> result = task->get_future();
  server.device_waiter().run([task] { (*task)(); });
  while (result.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready) {
    server.failed_collective();
    if (server.has_failed() || server.control().images == Images::unwanted) return cudaSuccess;
  }
  return result.get();
}

bool begin_image(Server& server, uint64_t image) {
  ControlBlock& control = server.control();
  for (;;) {
    control.image_begun = image;  // sequentially consistent, as the client's own order is
    const Images images = control.images;
    if (images == Images::made) return true;
    control.image_begun = image - 1;
    if (images == Images::unwanted || server.has_failed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

cudaError_t copy_image(const std::vector<wire::Range>& ranges) {
  for (const wire::Range& range : ranges) {
    choose_device(range.device);
    const cudaError_t error =
        real::cudaMemcpyAsync(reinterpret_cast<void*>(range.to), reinterpret_cast<const void*>(range.from),
                              range.bytes, cudaMemcpyDeviceToHost, nullptr);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

std::set<int32_t> devices_of(const std::vector<wire::Range>& ranges) {
  std::set<int32_t> devices;
  for (const wire::Range& range : ranges) devices.insert(range.device);
  return devices;
}

// The reader itself waits for the device here: the log is where the calls that come after wait, and nothing
// can write to what is copied.
int32_t serve_keep_image(Request& request) {
  const auto arguments = request.arguments<wire::keep_image>();
  const auto ranges = entries_after<wire::keep_image, wire::Range>(request, arguments.ranges);
  ControlBlock& control = request.server.control();
  if (arguments.image <= control.image_whole) return cudaSuccess;
  const std::set<int32_t> devices = devices_of(ranges);
  if (const cudaError_t error = come_to_rest(devices, request.server); error != cudaSuccess) return error;
  if (request.server.has_failed()) return cudaSuccess;  // who waits for the image is told of that
  if (!begin_image(request.server, arguments.image)) return cudaSuccess;
  if (const cudaError_t error = copy_image(ranges); error != cudaSuccess) return error;
  if (const cudaError_t error = synchronize(devices); error != cudaSuccess) return error;
  control.image_whole = arguments.image;
  return cudaSuccess;
}

int32_t serve_note_time(Request& request) {
  const auto made = request.arguments<wire::note_time>().made;
  if (made >= made_count)
    throw CallFailure(cudaErrorInvalidValue, "a record wants the time noted of nothing");
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  request.server.control().made_at[made] = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  return cudaSuccess;
}

int32_t serve_was_over(Request& request) {
  if (!request.server.replays()) return cudaSuccess;
  const auto arguments = request.arguments<wire::was_over>();
  try {
    if (arguments.event != 0) return real::cudaEventSynchronize(request.server.events.find(arguments.event));
    return real::cudaStreamSynchronize(request.server.streams.find(arguments.stream));
  } catch (const CallFailure&) {
    return cudaSuccess;  // another thread of the program has ended it
  }
}

int32_t serve_newest_image(Request& request) {
  request.answer<wire::newest_image_answer>().image = request.server.control().image_whole;
  return cudaSuccess;
}

}  // namespace jitckpt::proxy
