// How ranks that share nothing but a unique id come to share memory.
//
// The process that makes the id listens on an abstract Unix socket, whose random name is in the id, until all
// ranks have come, and hands each the memfd. Nothing has a name in the file system, so nothing is left behind
// when any of them is killed at any moment.
#pragma once
#include <nccl.h>

#include <atomic>

#include "file_descriptor.h"

namespace softgpu::nccl {

// Starts a listener in this process. It ends when all ranks have come, or with the process.
ncclUniqueId make_unique_id();

// The shared memory of the communicator that the id stands for. Throws a Failure: ncclInvalidArgument if the
// id is none of ours, or rank or ranks contradict what other ranks said; ncclRemoteError if nobody listens;
// ncclInternalError once `aborted` is true.
FileDescriptor join(const ncclUniqueId& id, int rank, int ranks, const std::atomic<bool>& aborted);

// Ends the listener of an id that no rank is going to use.
void dismiss(const ncclUniqueId& id);

}  // namespace softgpu::nccl
