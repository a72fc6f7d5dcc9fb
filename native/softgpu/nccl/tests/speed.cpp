// Not a test: what an all-reduce between processes costs on this machine, beside a memcpy of as many bytes.
// softgpu_nccl_speed [ranks]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "softgpu/nccl/tests/rank_processes.h"

namespace {

template <class Work>
double best_seconds(int repetitions, Work work) {
  double best = 1e9;
  for (int i = 0; i < repetitions; ++i) {
    const auto start = std::chrono::steady_clock::now();
    work();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

void measure(Rank& rank) {
  const ncclComm_t communicator = rank.communicator();
  const Stream stream;
  if (rank.rank == 0) std::printf("%12s %12s %12s %12s\n", "bytes", "us", "GB/s", "memcpy GB/s");
  for (size_t bytes = 64; bytes <= size_t{64} << 20; bytes *= 4) {
    const std::vector<std::byte> data(bytes);
    std::vector<std::byte> other(bytes, std::byte{1});
    const Buffer buffer(data);
    const int repetitions = bytes > size_t{1} << 20 ? 20 : 200;
    const double seconds = best_seconds(repetitions, [&] {
      ncclAllReduce(buffer.at(), buffer.at(), bytes / 4, ncclFloat32, ncclSum, communicator, stream);
      stream.synchronize();
    });
    const double copy = best_seconds(repetitions, [&] { std::memcpy(other.data(), data.data(), bytes); });
    if (rank.rank == 0) {
      std::printf("%12zu %12.1f %12.2f %12.2f\n", bytes, seconds * 1e6, bytes / seconds / 1e9,
                  bytes / copy / 1e9);
    }
  }
  ncclCommDestroy(communicator);
}

}  // namespace

int main(int count, char** arguments) { run_ranks(count > 1 ? std::atoi(arguments[1]) : 2, measure); }
