// Device calls of threads that work for a save. All streams of the application may be blocked behind a
// collective that never ends, so everything goes to streams of the save's own, one a device: in the order in
// which it was called.
#pragma once
#include <cuda_runtime_api.h>
#include <nccl.h>

#include "hand_written.h"

namespace jitckpt::interpose {

// No other rank can answer a collective inside a save.
ncclResult_t refuse(const char* call);

namespace save {

// The save is over. The next one gets fresh streams: those of this one may have got stuck, and go with what
// is postponed.
void end();

// The save's stream on the device that is current on this thread.
cudaStream_t stream();

// A synchronous call that was made an asynchronous one on stream(): waits for it.
cudaError_t synchronised(cudaError_t enqueued);

}  // namespace save

namespace hold {

// Frees what was to be freed while the gate was closed, when the real call would have waited for the device.
void free_postponed();

}  // namespace hold
}  // namespace jitckpt::interpose
