// A device library whose streams a test blocks and whose answers it chooses: for what a real or a soft device
// does only when it fails. It has CUDA's and NCCL's symbols and stands behind the entry points as the real
// libraries do.
#pragma once
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <string>
#include <vector>

namespace fake {

struct Call {
  std::string name;
  cudaStream_t stream;
};

void reset();

// Work on a blocked stream does not finish.
void block(cudaStream_t stream);
void unblock(cudaStream_t stream);

// Every cudaEventQuery hangs, as behind another thread's cudaDeviceSynchronize.
void hang_queries(bool hang);
int hanging_queries();  // how many hang now

void fail_queries(cudaError_t error);  // all of them answer this, as on a device that has failed

void capture(cudaStream_t stream, bool capturing);
void refuse_events(bool refuse);
void set_last_error(cudaError_t error);
void answer_nccl_calls(ncclResult_t result);
void set_async_error(ncclResult_t result);

// The calls that reached this library since the last reset, without queries.
std::vector<Call> calls();
int count(const std::string& name);

}  // namespace fake
