// NCCL's communicators and what is known of each: a number, how many collectives it has had, whether it
// failed.
#pragma once
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace jitckpt::interpose {

// One NCCL data call, or what a group did on one stream.
struct Operation {
  const char* name;
  ncclComm_t communicator;
  cudaStream_t stream;
  uint64_t bytes;
  uint32_t calls = 1;
};

struct Place {
  uint64_t communicator;  // its number, in the order of first use
  uint64_t sequence;      // of its operations, from 1
};

class Communicators {
 public:
  Place next(ncclComm_t communicator);
  void forget(ncclComm_t communicator);

  // A communicator that does not block may enqueue an operation only later, on a thread of its own: it is
  // kept until ncclCommGetAsyncError says that the enqueuing is over.
  void postpone(const Operation& operation);
  std::vector<Operation> take_postponed(ncclComm_t communicator);

  // True the first time that a communicator fails.
  bool failed(ncclComm_t communicator);

 private:
  struct Known {
    uint64_t number;
    uint64_t sequence = 0;
    bool failed = false;
    std::vector<Operation> postponed;
  };
  Known& known(ncclComm_t communicator);

  std::mutex mutex_;
  std::unordered_map<ncclComm_t, Known> known_;
  uint64_t count_ = 0;
};

}  // namespace jitckpt::interpose
