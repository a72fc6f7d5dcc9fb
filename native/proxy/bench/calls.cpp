// Prints the nanoseconds that a call takes in the program, the median of many bursts: calls
// launch|query|synchronize; or, of launches with other work of the program before each, the mean: calls
// launch MICROSECONDS
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "proxy/tests/kernels.h"

namespace {

void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

// The device catches up between bursts: what is measured is what the caller does, not what it waits for.
template <typename Call>
double nanoseconds(int bursts, int calls, const Call& call) {
  std::vector<double> times;
  for (int burst = 0; burst < bursts; ++burst) {
    require(cudaDeviceSynchronize());
    const auto begin = std::chrono::steady_clock::now();
    for (int count = 0; count < calls; ++count) call();
    const std::chrono::duration<double, std::nano> passed = std::chrono::steady_clock::now() - begin;
    times.push_back(passed.count() / calls);
  }
  std::nth_element(times.begin(), times.begin() + bursts / 2, times.end());
  return times[static_cast<std::size_t>(bursts) / 2];
}

template <typename Call>
double nanoseconds_after(std::chrono::microseconds work, const Call& call) {
  using Clock = std::chrono::steady_clock;
  constexpr auto in_all = std::chrono::milliseconds(500);
  const auto end = Clock::now() + in_all;
  Clock::duration sum{};
  int calls = 0;
  for (auto worked = Clock::now(); worked < end; worked = Clock::now()) {
    while (Clock::now() - worked < work) {
    }
    const auto begin = Clock::now();
    call();
    sum += Clock::now() - begin;
    ++calls;
  }
  return std::chrono::duration<double, std::nano>(sum).count() / calls;
}

}  // namespace

int main(int count, char** words) {
  if (count != 2 && count != 3) return 2;
  int* number = nullptr;
  cudaEvent_t event = nullptr;
  require(cudaMalloc(reinterpret_cast<void**>(&number), sizeof(int)));
  require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  int amount = 1;
  void* arguments[] = {&number, &amount};
  const auto launch = [&] {
    require(cudaLaunchKernel(kernels::add(), dim3(1), dim3(1), arguments, 0, nullptr));
  };
  launch();
  double time = 0;
  if (count == 3) {
    if (std::strcmp(words[1], "launch") != 0) return 2;
    time = nanoseconds_after(std::chrono::microseconds(std::atoi(words[2])), launch);
  } else if (std::strcmp(words[1], "launch") == 0) {
    time = nanoseconds(501, 100, launch);
  } else if (std::strcmp(words[1], "query") == 0) {
    time = nanoseconds(501, 100, [&] { require(cudaEventQuery(event)); });
  } else if (std::strcmp(words[1], "synchronize") == 0) {
    time = nanoseconds(501, 100, [] { require(cudaStreamSynchronize(nullptr)); });
  } else {
    return 2;
  }
  std::printf("%.1f\n", time);
  return 0;
}
