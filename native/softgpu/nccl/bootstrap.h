// How ranks that share nothing but a unique id meet.
//
// The process that makes the id listens, at an address that is in the id, until all ranks have come, and then
// tells each where the others are. Ranks of one host get the memory that they share; ranks of two hosts get a
// connection in each direction. Nothing has a name in the file system, so nothing is left behind when any of
// them is killed at any moment.
#pragma once
#include <nccl.h>

#include <atomic>
#include <string>
#include <vector>

#include "softgpu/nccl/file_descriptor.h"

namespace softgpu::nccl {

// The connections with a rank of another host; each carries what one side tells the other and nothing back.
struct RemotePeer {
  int rank;
  std::string address;
  FileDescriptor to, from;
};

struct Meeting {
  FileDescriptor memory;  // shared with the other ranks of this host
  std::vector<RemotePeer> remote;
};

// Starts a listener in this process. It ends when all ranks have come, or with the process.
ncclUniqueId make_unique_id();

// Waits until all ranks of the communicator that the id stands for have come. Throws a NcclFailure:
// ncclInvalidArgument if the id is none of ours, or rank or ranks contradict what other ranks said;
// ncclRemoteError if nobody listens; ncclInternalError once `aborted` is true.
Meeting join(const ncclUniqueId& id, int rank, int ranks, const std::atomic<bool>& aborted);

// Ends the listener of an id that no rank is going to use.
void dismiss(const ncclUniqueId& id);

}  // namespace softgpu::nccl
