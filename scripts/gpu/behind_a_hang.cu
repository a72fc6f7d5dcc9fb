// What a process can still do on a GPU while a kernel of its own never ends and work waits behind it.
//
//   nvcc -O2 -std=c++17 -o behind_a_hang scripts/gpu/behind_a_hang.cu -lcuda
//   timeout 3 ./behind_a_hang KIND COUNT TRY
//
// KIND: what waits on the default stream behind the hang: kernel, copy (to the host), fill, graph (100
// kernels), wait (for an event) or record. COUNT: how many. TRY: copy (4 MiB to the host, by a stream from
// before the hang), late (by one from after it), kernel (that copies), context (by another context of the
// process), malloc, event (a new one) or none. It prints how many of KIND could be put there, and what TRY
// came to; a TRY that never returns is ended by `timeout`. Set CUDA_DEVICE_MAX_CONNECTIONS to try that, too.
#include <cuda.h>
#include <cuda_runtime.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

namespace {

constexpr size_t bytes = 4 << 20;

void check(int result, const char* what) {
  if (result == 0) return;
  std::printf(" %s: error %d\n", what, result);
  std::fflush(stdout);
  _exit(1);
}
#define CHECK(call) check(static_cast<int>(call), #call)

void say(const char* what) {
  std::printf(" %s", what);
  std::fflush(stdout);
}

__global__ void hang(volatile int* flag) {
  while (*flag == 0) __nanosleep(1000);
}
__global__ void add(float* value) { *value += 1; }
__global__ void copy(const int4* from, int4* to, size_t count) {
  for (size_t at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += gridDim.x * blockDim.x)
    to[at] = from[at];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const std::string kind = argv[1], attempt = argv[3];
  const long count = std::atol(argv[2]);
  int* flag;
  char *device, *host;
  float* value;
  CHECK(cudaHostAlloc(&flag, sizeof *flag, cudaHostAllocMapped));
  CHECK(cudaHostAlloc(&host, bytes, cudaHostAllocMapped | cudaHostAllocPortable));
  CHECK(cudaMalloc(&device, bytes));
  CHECK(cudaMalloc(&value, sizeof *value));
  *flag = 0;
  cudaStream_t hung, early, capture;
  for (cudaStream_t* const stream : {&hung, &capture})
    CHECK(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
  int least, greatest;
  CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  CHECK(cudaStreamCreateWithPriority(&early, cudaStreamNonBlocking, greatest));
  cudaEvent_t event;
  CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  // Kernels are loaded as they are first launched, which may wait for the device.
  add<<<1, 1>>>(value);
  copy<<<1, 32, 0, early>>>(reinterpret_cast<int4*>(device), reinterpret_cast<int4*>(host), 32);
  cudaGraph_t graph;
  cudaGraphExec_t launched;
  CHECK(cudaStreamBeginCapture(capture, cudaStreamCaptureModeRelaxed));
  for (int kernel = 0; kernel < 100; ++kernel) add<<<1, 1, 0, capture>>>(value);
  CHECK(cudaStreamEndCapture(capture, &graph));
  CHECK(cudaGraphInstantiate(&launched, graph, 0));
  CHECK(cudaGraphLaunch(launched, nullptr));
  CHECK(cudaDeviceSynchronize());
  CUcontext first, second;
  CUstream of_second;
  if (attempt == "context") {
    CHECK(cuCtxGetCurrent(&first));
    CUctxCreateParams parameters{};
    CHECK(cuCtxCreate(&second, &parameters, 0, 0));
    CHECK(cuStreamCreate(&of_second, CU_STREAM_NON_BLOCKING));
    CHECK(cuCtxSetCurrent(first));
  }

  hang<<<1, 1, 0, hung>>>(flag);
  CHECK(cudaEventRecord(event, hung));
  CHECK(cudaStreamWaitEvent(nullptr, event, 0));
  std::atomic<long> made{0};
  std::thread([&] {
    for (; made < count; ++made) {
      if (kind == "kernel") add<<<1, 1>>>(value);
      if (kind == "copy") CHECK(cudaMemcpyAsync(host, device, 1024, cudaMemcpyDeviceToHost, nullptr));
      if (kind == "fill") CHECK(cudaMemsetAsync(device, 0, 4, nullptr));
      if (kind == "graph") CHECK(cudaGraphLaunch(launched, nullptr));
      if (kind == "wait") CHECK(cudaStreamWaitEvent(nullptr, event, 0));
      if (kind == "record") CHECK(cudaEventRecord(event, nullptr));
    }
  }).detach();
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  std::printf("%ld of %s wait;", made.load(), kind.c_str());

  say(attempt.c_str());
  cudaStream_t stream = early;
  if (attempt == "late") CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  if (attempt == "copy" || attempt == "late") {
    CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
  } else if (attempt == "kernel") {
    copy<<<16, 256, 0, stream>>>(reinterpret_cast<int4*>(device), reinterpret_cast<int4*>(host),
                                 bytes / sizeof(int4));
    CHECK(cudaStreamSynchronize(stream));
  } else if (attempt == "context") {
    CHECK(cuCtxSetCurrent(second));
    CHECK(cuMemcpyDtoHAsync(host, reinterpret_cast<CUdeviceptr>(device), bytes, of_second));
    CHECK(cuStreamSynchronize(of_second));
  } else if (attempt == "malloc") {
    void* memory;
    CHECK(cudaMalloc(&memory, bytes));
  } else if (attempt == "event") {
    cudaEvent_t another;
    CHECK(cudaEventCreate(&another));
  }
  say("done\n");
  _exit(0);
}
