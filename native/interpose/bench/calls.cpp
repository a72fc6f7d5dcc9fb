// Prints the nanoseconds of one call, median of several rounds: calls launch|collective job|no_job
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>

#include "jitckpt.h"

namespace {

template <typename Call>
double nanoseconds(int repetitions, const Call& call) {
  std::vector<double> rounds;
  for (int round = 0; round < 11; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int count = 0; count < repetitions; ++count) call();
    const std::chrono::duration<double, std::nano> passed = std::chrono::steady_clock::now() - begin;
    rounds.push_back(passed.count() / repetitions);
  }
  std::nth_element(rounds.begin(), rounds.begin() + 5, rounds.end());
  return rounds[5];
}

// False if the library is not preloaded.
bool start_job() {
  const auto start = reinterpret_cast<decltype(&jitckpt_start)>(dlsym(RTLD_DEFAULT, "jitckpt_start"));
  if (!start) return false;
  jitckpt_config_t config{};
  config.agent_fd = -1;
  config.hang_timeout_s = 60;
  config.save = [](const char*) { return 0; };
  return start(&config) == 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  if (std::strcmp(arguments[2], "job") == 0 && !start_job()) return 1;
  const auto stream = reinterpret_cast<cudaStream_t>(0x10);
  const auto communicator = reinterpret_cast<ncclComm_t>(0x10);
  const bool launch = std::strcmp(arguments[1], "launch") == 0;
  const double time =
      launch ? nanoseconds(2000000, [&] { cudaLaunchKernel(nullptr, dim3(1), dim3(1), nullptr, 0, stream); })
             : nanoseconds(20000, [&] {
                 ncclAllReduce(nullptr, nullptr, 1, ncclFloat32, ncclSum, communicator, stream);
               });
  std::printf("%.2f\n", time);
  return 0;
}
