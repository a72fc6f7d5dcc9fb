// The few calls that need thought, seen right after they were passed on.
#pragma once
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>

#include "hand_written.h"

namespace jitckpt::interpose::observe {

// What comes next on this stream is such a call.
void before_collective(cudaStream_t stream);

// Every NCCL call that moves data. peer: of a send or receive, its other end.
void collective(ncclResult_t result, const char* name, ncclComm_t communicator, size_t count,
                ncclDataType_t datatype, cudaStream_t stream, int peer = -1);

// The signal that the process sends itself after the next NCCL call; 0 for none.
void arm_fault(int signal_number);

}  // namespace jitckpt::interpose::observe
