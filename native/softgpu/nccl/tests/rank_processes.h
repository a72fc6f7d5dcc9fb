// Real processes for the ranks of a test.
#pragma once
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <vector>

// What the processes of one test share besides NCCL: unique ids and flags.
struct Shared {
  struct Id {
    std::atomic<bool> made;
    ncclUniqueId value;
  } ids[16];
  std::atomic<int> flags[64];
};

class Rank {
 public:
  Rank(int rank, int ranks, Shared& shared) : rank(rank), ranks(ranks), shared_(shared) {}

  const int rank, ranks;

  // Ranks are dealt out to as many hosts as the environment says: with JITCKPT_TEST_HOSTS=2 ranks 0, 2, ...
  // are on one and the others on another, as far as NCCL knows.
  static int hosts();
  bool shares_host_with(int other) const { return rank % hosts() == other % hosts(); }

  // The same on all ranks; rank 0 makes it. Each number is another id.
  ncclUniqueId id(int number = 0);
  ncclComm_t communicator(int number = 0);

  void set(int flag) { shared_.flags[flag] = 1; }
  bool is_set(int flag) const { return shared_.flags[flag] != 0; }
  void wait_for(int flag) const;

 private:
  Shared& shared_;
};

// Ranks as child processes, forked while this process has no thread.
class RankProcesses {
 public:
  using Body = std::function<void(Rank&)>;
  RankProcesses(int ranks, const Body& body);
  ~RankProcesses();  // kills what is left

  Shared& shared() { return *shared_; }
  void wait_for(int flag) { Rank(0, 0, *shared_).wait_for(flag); }
  pid_t pid(int rank) const { return pids_[rank]; }
  void signal(int rank, int signal);
  // The wait status; fails the test if the rank does not end.
  int wait(int rank);
  // Expects that the rank ends without a failed expectation.
  void expect_success(int rank);

 private:
  Shared* shared_;
  std::vector<pid_t> pids_;
};

// Runs body on all ranks and expects that it succeeds on each.
void run_ranks(int ranks, const RankProcesses::Body& body);

class Stream {
 public:
  explicit Stream(unsigned flags = cudaStreamDefault) {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, flags), cudaSuccess);
  }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void synchronize() const { EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess); }

 private:
  cudaStream_t stream_ = nullptr;
};

// Memory of the device, filled and read by copies that wait for no other stream: another may hang.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes) { EXPECT_EQ(cudaMalloc(&memory_, bytes), cudaSuccess); }
  explicit Buffer(const std::vector<std::byte>& data) : Buffer(data.size()) { upload(data); }
  ~Buffer() { cudaFree(memory_); }
  Buffer(const Buffer&) = delete;

  void upload(const std::vector<std::byte>& data) {
    EXPECT_EQ(cudaMemcpyAsync(memory_, data.data(), data.size(), cudaMemcpyHostToDevice, copies_),
              cudaSuccess);
    copies_.synchronize();
  }
  std::vector<std::byte> download() const {
    std::vector<std::byte> data(bytes_);
    EXPECT_EQ(cudaMemcpyAsync(data.data(), memory_, bytes_, cudaMemcpyDeviceToHost, copies_), cudaSuccess);
    copies_.synchronize();
    return data;
  }
  size_t bytes() const { return bytes_; }
  std::byte* at(size_t offset = 0) const { return static_cast<std::byte*>(memory_) + offset; }

 private:
  void* memory_ = nullptr;
  size_t bytes_;
  Stream copies_{cudaStreamNonBlocking};
};

template <class T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}
template <class T>
std::vector<T> values_in(const Buffer& buffer) {
  const std::vector<std::byte> bytes = buffer.download();
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}
