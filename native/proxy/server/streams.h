// The program's streams, and on which of them something may be under way since the devices were last at rest.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace jitckpt::proxy {

class StreamTable {
 public:
  StreamTable() = default;
  ~StreamTable();
  StreamTable(const StreamTable&) = delete;
  StreamTable& operator=(const StreamTable&) = delete;

  // Counts as a use. Throws CallFailure.
  cudaStream_t find(uint64_t number);
  // Of the device that this thread has chosen.
  void add(uint64_t number, cudaStream_t stream);
  void remove(uint64_t number);
  std::vector<cudaStream_t> all();

  // A handle has it from now on, whose calls do not name it: it counts as used at any time.
  void belongs_to_handle(uint64_t number);
  // The program ends this one, and what is on it may go on: from now on an event stands for it.
  void leaves(uint64_t number);
  // Has the legacy stream of a device, which this thread has chosen, wait for all that is on its streams by
  // now.
  cudaError_t join(int32_t device);

 private:
  struct Stream {
    cudaStream_t stream;
    int32_t device;
    bool used = false, of_handle = false;
  };
  std::mutex mutex_;
  std::unordered_map<uint64_t, Stream> streams_;
  std::vector<uint64_t> used_;  // numbers; each stream once
  struct Left {
    cudaEvent_t event;
    int32_t device;
  };
  std::vector<Left> left_;
};

}  // namespace jitckpt::proxy
