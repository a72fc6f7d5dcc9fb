// NCCL's communicators and what is known of each: an identity that is the same on all of its ranks, how many
// operations it has had, whether it failed.
#pragma once
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "watchdog/watch_list.h"

namespace jitckpt::interpose {

// One NCCL data call, or what a group did on one stream.
struct ObservedOperation {
  const char* name;
  ncclComm_t communicator;
  cudaStream_t stream;
  uint64_t bytes;
  uint32_t calls = 1;
  std::vector<watchdog::PointToPoint> exchanges = {};  // none: a collective
};

// What a rank has enqueued on one communicator.
struct CommunicatorProgress {
  uint64_t identity = 0;
  int rank = -1, ranks = 0;                           // of the communicator
  uint64_t sequence = 0;                              // collectives
  std::map<int, uint64_t> sends = {}, receives = {};  // by peer
};

class Communicators {
 public:
  // How it was made says who it is: from a unique id, or from another communicator, by the number-th call of
  // its kind and with the same color on all ranks. One made otherwise (ncclCommInitAll) has an identity of
  // this process's own.
  void made(ncclComm_t communicator, const ncclUniqueId* ids, int count);
  void made_from(ncclComm_t parent, ncclComm_t communicator, uint64_t distinction);

  // The watch for the operation, which is counted.
  watchdog::Watch next(const ObservedOperation& operation);
  std::vector<CommunicatorProgress> progress() const;
  void forget(ncclComm_t communicator);

  // A communicator that does not block may enqueue an operation only later, on a thread of its own: it is
  // kept until ncclCommGetAsyncError says that the enqueuing is over.
  void postpone(const ObservedOperation& operation);
  std::vector<ObservedOperation> take_postponed(ncclComm_t communicator);

  // True the first time that a communicator fails.
  bool failed(ncclComm_t communicator);

 private:
  struct Known {
    CommunicatorProgress progress;
    uint64_t children = 0;
    bool failed = false;
    std::vector<ObservedOperation> postponed;
  };
  Known& known(ncclComm_t communicator);

  mutable std::mutex mutex_;
  std::unordered_map<ncclComm_t, Known> known_;
  uint64_t unnamed_ = 0;
};

}  // namespace jitckpt::interpose
