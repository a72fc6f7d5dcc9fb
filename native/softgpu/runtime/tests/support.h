// What the tests of the runtime share: streams that can be held up, and kernels of a module as a library
// would register it.
#pragma once
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "softgpu/runtime/cudart.h"

// Fails the test with CUDA's own words.
void expect_success(cudaError_t error, const char* file, int line);
inline void ok(cudaError_t error, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  expect_success(error, file, line);
}

// The call found work unfinished, which is no failure but the thread's last error.
inline void expect_not_ready(cudaError_t error) {
  EXPECT_EQ(error, cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
}

// Holds a stream up until it is opened, at the latest when it goes out of scope.
class Gate {
 public:
  Gate() = default;
  explicit Gate(cudaStream_t stream) { close(stream); }
  ~Gate() { open(); }

  void close(cudaStream_t stream);
  void wait_for_streams();  // returns when all stand before it
  void open();              // returns when all have passed

 private:
  static void wait(void* gate);

  std::mutex mutex_;
  std::condition_variable changed_;
  int to_pass_ = 0, waiting_ = 0;
  bool open_ = false;
};

// A stream of the current device, destroyed at the end.
class OwnStream {
 public:
  explicit OwnStream(unsigned flags = cudaStreamDefault) { ok(cudaStreamCreateWithFlags(&stream_, flags)); }
  ~OwnStream() { ok(cudaStreamDestroy(stream_)); }
  operator cudaStream_t() const { return stream_; }  // NOLINT: it stands for the handle

 private:
  cudaStream_t stream_ = nullptr;
};

class OwnEvent {
 public:
  explicit OwnEvent(unsigned flags = cudaEventDefault) { ok(cudaEventCreateWithFlags(&event_, flags)); }
  ~OwnEvent() { ok(cudaEventDestroy(event_)); }
  operator cudaEvent_t() const { return event_; }  // NOLINT: it stands for the handle

 private:
  cudaEvent_t event_ = nullptr;
};

// Device memory for ints.
class DeviceInts {
 public:
  explicit DeviceInts(std::size_t count) : count_(count) {
    ok(cudaMalloc(reinterpret_cast<void**>(&begin_), count * sizeof(int)));
  }
  ~DeviceInts() { cudaFree(begin_); }
  int* get() const { return begin_; }
  std::vector<int> read() const;
  void write(const std::vector<int>& values) const;

 private:
  int* begin_ = nullptr;
  std::size_t count_;
};

// Puts a number at the end of a list when the stream comes by.
class Diary {
 public:
  void note(cudaStream_t stream, int number);
  std::vector<int> read();

 private:
  struct Entry {
    Diary* diary;
    int number;
  };
  std::mutex mutex_;
  std::vector<int> numbers_;
};

// Kernels of a softgpu module, registered as nvcc's code would do it. The addresses are their host stubs.
namespace kernels {
// add(int* to, int amount): *to += amount. nap(int* to, int amount): the same, in a millisecond. fail(): an
// illegal address.
extern char add, nap, fail, missing, nvidia;
void register_all();
}  // namespace kernels
