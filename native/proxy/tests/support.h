// What the tests of the proxy share.
#pragma once
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <vector>

#include "proxy/tests/kernels.h"

inline void ok(cudaError_t error, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (error != cudaSuccess)
    ADD_FAILURE_AT(file, line) << cudaGetErrorName(error) << ": " << cudaGetErrorString(error);
}

inline void ok(ncclResult_t result, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (result != ncclSuccess)
    ADD_FAILURE_AT(file, line) << ncclGetErrorString(result) << ": " << ncclGetLastError(nullptr);
}

inline void launch_add(int* to, int amount, cudaStream_t stream = nullptr) {
  void* arguments[] = {&to, &amount};
  ok(cudaLaunchKernel(kernels::add(), dim3(1), dim3(1), arguments, 0, stream));
}

inline void launch_mix(int* to, int* from, cudaStream_t stream = nullptr) {
  void* arguments[] = {&to, &from};
  ok(cudaLaunchKernel(kernels::mix(), dim3(1), dim3(1), arguments, 0, stream));
}

inline void launch_upload(int* to, int* value, cudaStream_t stream) {
  void* arguments[] = {&to, &value};
  ok(cudaLaunchKernel(kernels::upload(), dim3(1), dim3(1), arguments, 0, stream));
}

inline void launch_nap(int microseconds, cudaStream_t stream = nullptr) {
  void* arguments[] = {&microseconds};
  ok(cudaLaunchKernel(kernels::nap(), dim3(1), dim3(1), arguments, 0, stream));
}

class DeviceInts {
 public:
  explicit DeviceInts(std::size_t count, int value = 0) : count_(count) {
    ok(cudaMalloc(reinterpret_cast<void**>(&begin_), count * sizeof(int)));
    const std::vector<int> values(count, value);
    ok(cudaMemcpy(begin_, values.data(), count * sizeof(int), cudaMemcpyHostToDevice));
  }
  ~DeviceInts() { cudaFree(begin_); }
  DeviceInts(const DeviceInts&) = delete;
  DeviceInts& operator=(const DeviceInts&) = delete;
  int* get() const { return begin_; }
  std::vector<int> read(cudaStream_t stream = nullptr) const {
    std::vector<int> values(count_);
    ok(cudaMemcpyAsync(values.data(), begin_, count_ * sizeof(int), cudaMemcpyDeviceToHost, stream));
    return values;
  }

 private:
  int* begin_ = nullptr;
  std::size_t count_;
};

class OwnStream {
 public:
  OwnStream() { ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~OwnStream() { ok(cudaStreamDestroy(stream_)); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator cudaStream_t() const { return stream_; }  // NOLINT: it stands for the handle

 private:
  cudaStream_t stream_ = nullptr;
};

// Holds a stream up until it is opened, at the latest when it goes out of scope.
class Gate {
 public:
  explicit Gate(cudaStream_t stream) {
    ok(cudaHostAlloc(reinterpret_cast<void**>(&flag_), sizeof(int), cudaHostAllocDefault));
    std::atomic_ref<int>(*flag_).store(0);
    void* arguments[] = {&flag_};
    ok(cudaLaunchKernel(kernels::hold(), dim3(1), dim3(1), arguments, 0, stream));
  }
  ~Gate() {
    open();
    ok(cudaFreeHost(flag_));
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void open() { std::atomic_ref<int>(*flag_).store(1); }

 private:
  int* flag_ = nullptr;
};

// The server of a process of this program; 0: none.
pid_t find_server(pid_t client = getpid());
// It and its spare.
std::vector<pid_t> find_servers(pid_t client = getpid());
// Waits until a process has ended; false if it does not.
bool ends(pid_t process);

// Runs one test of this program in a process of its own, with variables NAME=VALUE, and gives back what it
// wrote and how it ended.
struct Ended {
  int status;
  std::string output;
};
Ended run_alone(const std::string& test, const std::vector<std::string>& variables = {});

// NCCL's ids for the environment of another process.
std::string hex(const ncclUniqueId& id);
ncclUniqueId id_of(const char* text);

// Whether this process is such a one.
bool alone();
