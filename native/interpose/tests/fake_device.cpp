#include "interpose/tests/fake_device.h"

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace {

struct RecordedEvent {
  cudaStream_t stream = nullptr;
  bool recorded = false;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<fake::Call> calls;
  std::set<cudaStream_t> blocked, capturing;
  std::map<cudaEvent_t, RecordedEvent> events;
  uintptr_t next_handle = 0x1000;
  int hanging_queries = 0;
  bool hang_queries = false, refuse_events = false;
  cudaError_t query_error = cudaSuccess;
  ncclResult_t nccl_result = ncclSuccess, async_error = ncclSuccess;
};

State& state() {
  static auto* const made = new State;
  return *made;
}

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;
std::atomic<cudaError_t> error_for_all{cudaSuccess};

// The state, locked.
struct Locked {
  State& all = state();
  std::unique_lock<std::mutex> lock{all.mutex};
  State* operator->() { return &all; }
  void note(const char* name, cudaStream_t stream = nullptr) { all.calls.push_back({name, stream}); }
  void wait_until_free(cudaStream_t stream) {
    all.changed.wait(lock, [&] { return !all.blocked.contains(stream); });
  }
};

template <typename Handle>
Handle new_handle(Locked& locked) {
  return reinterpret_cast<Handle>(locked->next_handle += 16);
}

cudaError_t enqueue(const char* name, cudaStream_t stream) {
  Locked().note(name, stream);
  return cudaSuccess;
}

ncclResult_t nccl_call(const char* name, cudaStream_t stream = nullptr) {
  Locked locked;
  locked.note(name, stream);
  return locked->nccl_result;
}

}  // namespace

namespace fake {

void reset() {
  Locked locked;
  locked->calls.clear();
  locked->blocked.clear();
  locked->capturing.clear();
  locked->hang_queries = locked->refuse_events = false;
  locked->query_error = cudaSuccess;
  locked->nccl_result = locked->async_error = ncclSuccess;
  locked->changed.notify_all();
  last_error = cudaSuccess;
}

void block(cudaStream_t stream) { Locked()->blocked.insert(stream); }

void unblock(cudaStream_t stream) {
  Locked locked;
  locked->blocked.erase(stream);
  locked->changed.notify_all();
}

void hang_queries(bool hang) {
  Locked locked;
  locked->hang_queries = hang;
  locked->changed.notify_all();
}

void fail_queries(cudaError_t error) { Locked()->query_error = error; }

int hanging_queries() { return Locked()->hanging_queries; }

void capture(cudaStream_t stream, bool capturing) {
  Locked locked;
  if (capturing) {
    locked->capturing.insert(stream);
  } else {
    locked->capturing.erase(stream);
  }
}

void refuse_events(bool refuse) { Locked()->refuse_events = refuse; }
void set_last_error(cudaError_t error) { last_error = error; }
void answer_nccl_calls(ncclResult_t result) { Locked()->nccl_result = result; }
void set_async_error(ncclResult_t result) { Locked()->async_error = result; }

std::vector<Call> calls() { return Locked()->calls; }

int count(const std::string& name) {
  Locked locked;
  int found = 0;
  for (const Call& call : locked->calls) found += call.name == name;
  return found;
}

}  // namespace fake

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "an error of the fake device"; }
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int) {
  Locked locked;
  *stream = new_handle<cudaStream_t>(locked);
  locked.note("cudaStreamCreateWithPriority", *stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return enqueue("cudaStreamDestroy", stream); }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status =
      Locked()->capturing.contains(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
// One graph for each stream.
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long*, cudaGraph_t* graph, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  *graph = reinterpret_cast<cudaGraph_t>(stream);
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t stream) {
  return enqueue("cudaGraphLaunch", stream);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (!Locked()->blocked.contains(stream)) return cudaSuccess;
  return last_error = cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Locked locked;
  locked.note("cudaStreamSynchronize", stream);
  locked.wait_until_free(stream);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return enqueue("cudaDeviceSynchronize", nullptr); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned int) {
  return enqueue("cudaStreamWaitEvent", stream);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  Locked locked;
  if (locked->refuse_events) return last_error = cudaErrorMemoryAllocation;
  *event = new_handle<cudaEvent_t>(locked);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Locked locked;
  locked.note("cudaEventRecord", stream);
  locked->events[event] = {stream, true};
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  Locked locked;
  ++locked->hanging_queries;
  locked->changed.wait(locked.lock, [&] { return !locked->hang_queries; });
  --locked->hanging_queries;
  if (locked->query_error != cudaSuccess) return last_error = locked->query_error;
  const RecordedEvent& recorded = locked->events[event];
  if (!recorded.recorded || !locked->blocked.contains(recorded.stream)) return cudaSuccess;
  return last_error = cudaErrorNotReady;
}

CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        CUstream stream, void**, void**) {
  enqueue("cuLaunchKernel", stream);
  return CUDA_SUCCESS;
}

cudaError_t cudaMalloc(void** pointer, size_t) {
  Locked locked;
  *pointer = new_handle<void*>(locked);
  return cudaSuccess;
}
cudaError_t cudaFree(void*) { return enqueue("cudaFree", nullptr); }
cudaError_t cudaMemcpy(void* to, const void* from, size_t count, cudaMemcpyKind) {
  Locked locked;
  locked.note("cudaMemcpy");
  locked.wait_until_free(nullptr);
  std::memcpy(to, from, count);
  return cudaSuccess;
}
cudaError_t cudaMemcpy_ptds(void*, const void*, size_t, cudaMemcpyKind) {
  return enqueue("cudaMemcpy_ptds", nullptr);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t count, cudaMemcpyKind, cudaStream_t stream) {
  std::memcpy(to, from, count);
  return enqueue("cudaMemcpyAsync", stream);
}
cudaError_t cudaMemcpyAsync_ptsz(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t stream) {
  return enqueue("cudaMemcpyAsync_ptsz", stream);
}
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t stream) {
  return enqueue("cudaMemsetAsync", stream);
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return enqueue("cudaLaunchKernel", stream);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return enqueue("__cudaLaunchKernel", stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  return enqueue("cudaLaunchKernelExC", config->stream);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  function(argument);
  return enqueue("cudaLaunchHostFunc", stream);
}

ncclResult_t ncclAllReduce(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                           cudaStream_t stream) {
  return nccl_call("ncclAllReduce", stream);
}
ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t stream) {
  return nccl_call("ncclSend", stream);
}
ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return nccl_call("ncclGroupEnd"); }
ncclResult_t ncclCommAbort(ncclComm_t) { return nccl_call("ncclCommAbort"); }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = Locked()->async_error;
  return ncclSuccess;
}
// NVIDIA's library calls these two of its own by the linker: they come by the entry points again.
ncclResult_t ncclCommUserRank(ncclComm_t communicator, int* rank) {
  ncclResult_t error = ncclSuccess;
  *rank = 0;
  return ncclCommGetAsyncError(communicator, &error);
}
ncclResult_t ncclCommCount(ncclComm_t communicator, int* count) {
  return ncclCommUserRank(communicator, count);
}
ncclResult_t ncclBroadcast(const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t stream) {
  return nccl_call("ncclBroadcast", stream);
}
ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t communicator,
                       cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, communicator, stream);
}
const char* ncclGetErrorString(ncclResult_t) { return "an error of the fake NCCL"; }
const char* ncclGetLastError(ncclComm_t) { return "the fake NCCL's last error"; }

}  // extern "C"
