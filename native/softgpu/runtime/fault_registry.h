// What is armed in this process, and when it happens. While nothing is armed, asking costs one relaxed load.
#pragma once
#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "softgpu/runtime/fault.h"

namespace softgpu {

namespace fault_registry {

// A bit for each question below whose answer may be another than "nothing": a FaultPoint, or one of these.
constexpr unsigned memory_bit = 1u << 3, kernels_bit = 1u << 4, links_bit = 1u << 5;
constexpr unsigned bit(FaultPoint point) { return 1u << static_cast<unsigned>(point); }
inline std::atomic<unsigned> noteworthy{0};
inline bool is_noteworthy(unsigned bits) { return noteworthy.load(std::memory_order_relaxed) & bits; }

std::optional<Fault> count_call(FaultPoint point);
double kernel_factor();

}  // namespace fault_registry

// The fault is meant for another rank than this process's.
struct FaultElsewhere : FaultSyntax {
  using FaultSyntax::FaultSyntax;
};

// Arms the fault that the text describes. Returns a sentence on what will happen; throws FaultSyntax with
// one.
std::string arm_fault(std::string_view text);

// Arms what SOFTGPU_FAULTS holds (texts with semicolons between), but not what is meant for other ranks.
// Throws CudaFailure.
void arm_faults_of_environment();

// The process's rank in its job (RANK), if it has one.
std::optional<int> job_rank();

// Counts a call, and gives what has to happen to it. What lasts begins here, and is asked for below.
inline std::optional<Fault> fault_at(FaultPoint point) {
  if (!fault_registry::is_noteworthy(fault_registry::bit(point))) return std::nullopt;
  return fault_registry::count_call(point);
}

// Whether no cudaMalloc finds memory.
inline bool memory_is_taken() { return fault_registry::is_noteworthy(fault_registry::memory_bit); }

// What kernels take the time of, as a factor.
inline double kernel_factor() {
  return fault_registry::is_noteworthy(fault_registry::kernels_bit) ? fault_registry::kernel_factor() : 1;
}

// The way to other ranks of the job: to one, or to several, of which the worst counts.
struct Disturbance {
  bool cut = false;
  double factor = 1;
};
inline bool links_are_disturbed() { return fault_registry::is_noteworthy(fault_registry::links_bit); }
Disturbance disturbance_to(int peer);

// Runs work, and stays for so long that all takes `factor` times as long; less if `stop` says so.
template <class Work, class Stop>
void run_slowed(double factor, Work work, Stop stop) {
  if (factor <= 1) return work();
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  work();
  const auto end = begin + std::chrono::duration_cast<Clock::duration>(factor * (Clock::now() - begin));
  constexpr Clock::duration look_again = std::chrono::milliseconds(50);
  while (Clock::now() < end && !stop())
    std::this_thread::sleep_until(std::min(end, Clock::now() + look_again));
}

}  // namespace softgpu
