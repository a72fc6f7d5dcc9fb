// ncclGroupStart and ncclGroupEnd: what this thread calls in between waits for the outermost end.
#pragma once
#include <nccl.h>

#include <functional>
#include <memory>

#include "softgpu/nccl/launch.h"

namespace softgpu::nccl {

// A call that waits for other ranks on the host: making a communicator, or finalizing one.
struct HostTask {
  std::function<void()> work;
  // Their states say how it went: in progress, success, or what work threw.
  std::vector<std::shared_ptr<Communicator>> communicators;
  ncclComm_t* made = nullptr;  // the application's handle, cleared if a blocking task fails
  bool blocking = true;        // else it runs on a thread of its own, and ncclInProgress is the answer
};

void start_group();
ncclResult_t end_group();
void drop_group();  // ends the outermost group without doing anything

// These run at once if no group is open.
ncclResult_t submit(const Call& call);
ncclResult_t submit(HostTask task);

// A call in a group failed: the group will fail as well.
void spoil_group(ncclResult_t error);

}  // namespace softgpu::nccl
