// The streams that the application made, and on which devices it works.
#pragma once
#include <cuda_runtime_api.h>

#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace jitckpt::watchdog {

struct KnownStream {
  cudaStream_t handle;
  int device;
};

class Streams {
 public:
  void created(cudaStream_t stream, int device);
  void destroyed(cudaStream_t stream);
  void used_device(int device);  // its default stream counts from now on

  // The device of a stream; of a default stream, the one that is current on this thread.
  int device_of(cudaStream_t stream) const;

  // A device that the application uses, if it uses one yet.
  std::optional<int> any_device() const;

  // All streams that may have work, a default stream for each device. A per-thread default stream
  // (cudaStreamPerThread, or code compiled with it as default) can only be asked by its own thread and is not
  // among them.
  std::vector<KnownStream> all() const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<cudaStream_t, int> created_;
  std::vector<int> devices_;
};

}  // namespace jitckpt::watchdog
