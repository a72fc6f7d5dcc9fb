// Prints the nanoseconds of one call, median of several rounds: interposed_calls launch|collective job|no_job
// Or the share of a core that the library's threads take: interposed_calls watches PER_SECOND SECONDS
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "interpose/jitckpt.h"

namespace {

const auto stream = reinterpret_cast<cudaStream_t>(0x10);
const auto communicator = reinterpret_cast<ncclComm_t>(0x10);

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

// Processor seconds so far of the threads whose names begin with jitckpt-.
double seconds_of_own_threads() {
  double total = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    double nanoseconds = 0;
    std::ifstream(task.path() / "schedstat") >> nanoseconds;
    if (name.starts_with("jitckpt-")) total += nanoseconds / 1e9;
  }
  return total;
}

double share_of_a_core(int per_second, double seconds) {
  const auto reduce = [] { ncclAllReduce(nullptr, nullptr, 1, ncclFloat32, ncclSum, communicator, stream); };
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const double before = seconds_of_own_threads();
  const int calls = static_cast<int>(per_second * seconds);
  for (int call = 0; call < calls; ++call) {
    reduce();
    std::this_thread::sleep_until(begin + std::chrono::duration<double>((call + 1.0) / per_second));
  }
  std::this_thread::sleep_until(begin + std::chrono::duration<double>(seconds));
  const std::chrono::duration<double> passed = Clock::now() - begin;
  return (seconds_of_own_threads() - before) / passed.count();
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 4) {
    if (!start_job()) return 1;
    std::printf("%.6f\n", share_of_a_core(std::atoi(arguments[2]), std::atof(arguments[3])));
    return 0;
  }
  if (count != 3) return 2;
  if (std::strcmp(arguments[2], "job") == 0 && !start_job()) return 1;
  const bool launch = std::strcmp(arguments[1], "launch") == 0;
  const double time =
      launch ? nanoseconds(2000000, [&] { cudaLaunchKernel(nullptr, dim3(1), dim3(1), nullptr, 0, stream); })
             : nanoseconds(20000, [&] {
                 ncclAllReduce(nullptr, nullptr, 1, ncclFloat32, ncclSum, communicator, stream);
               });
  std::printf("%.2f\n", time);
  return 0;
}
