#pragma GCC visibility push(default)
#include "softgpu/fault.h"
#pragma GCC visibility pop

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "softgpu/runtime/error.h"
#include "softgpu/runtime/fault_registry.h"

namespace softgpu {
namespace {

struct Armed {
  Fault fault;
  std::uint64_t calls_left;  // until it happens, the one that it happens at included
};

// Never destroyed: streams may still ask while the process exits.
struct Registry {
  std::mutex mutex;
  std::vector<Armed> armed;
  std::vector<Fault> lasting;
};

Registry& registry() {
  static auto* const the_registry = new Registry;
  return *the_registry;
}

// Needs the registry's lock.
void publish() {
  unsigned bits = 0;
  for (const Armed& armed : registry().armed) bits |= fault_registry::bit(armed.fault.point);
  for (const Fault& fault : registry().lasting) {
    bits |= fault.kind == FaultKind::oom                   ? fault_registry::memory_bit
            : fault.kind == FaultKind::slow && !fault.link ? fault_registry::kernels_bit
                                                           : fault_registry::links_bit;
  }
  fault_registry::noteworthy.store(bits, std::memory_order_relaxed);
}

void announce(const Fault& fault, const std::string& when) {
  std::fprintf(stderr, "softgpu: the rehearsed fault '%s' happens %s\n", to_text(fault).c_str(),
               when.c_str());
}

// Needs the registry's lock.
void begin_lasting(const Fault& fault, const std::string& when) {
  announce(fault, when);
  registry().lasting.push_back(fault);
}

std::string arm(const Fault& fault) {
  const std::lock_guard lock(registry().mutex);
  std::string answer = to_text(fault) + " is armed";
  if (fault.kind == FaultKind::heal) {
    registry().armed.clear();
    registry().lasting.clear();
    announce(fault, "at once");
    answer = "what lasted has ended, and nothing is armed any more";
  } else if (fault.call == 0) {
    begin_lasting(fault, "at once");
    answer = to_text(fault) + " has begun";
  } else {
    registry().armed.push_back({fault, fault.call});
    answer += ": " + std::string(name_of(fault.point)) + " " + std::to_string(fault.call) + " from now on";
  }
  publish();
  return answer;
}

}  // namespace

namespace fault_registry {

std::optional<Fault> count_call(FaultPoint point) {
  const std::lock_guard lock(registry().mutex);
  std::optional<Fault> hit;
  auto& armed = registry().armed;
  for (auto each = armed.begin(); each != armed.end();) {
    if (each->fault.point == point && each->calls_left > 1) {
      --each->calls_left;
    } else if (each->fault.point == point && (!hit || lasts(each->fault.kind))) {
      const std::string when = std::string("at ") + name_of(point) + " " + std::to_string(each->fault.call);
      if (lasts(each->fault.kind)) {
        begin_lasting(each->fault, when);
      } else {
        announce(each->fault, when);
        hit = each->fault;
      }
      each = armed.erase(each);
      continue;
    }
    ++each;  // a second one that is due at this call happens at the next
  }
  publish();
  return hit;
}

double kernel_factor() {
  const std::lock_guard lock(registry().mutex);
  double factor = 1;
  for (const Fault& fault : registry().lasting) {
    if (fault.kind == FaultKind::slow && !fault.link) factor = std::max(factor, fault.factor);
  }
  return factor;
}

}  // namespace fault_registry

Disturbance disturbance_to(int peer) {
  const std::lock_guard lock(registry().mutex);
  Disturbance disturbance;
  for (const Fault& fault : registry().lasting) {
    if (fault.peer != Fault::every_peer && fault.peer != peer) continue;
    if (fault.kind == FaultKind::network_cut) disturbance.cut = true;
    if (fault.kind == FaultKind::slow && fault.link)
      disturbance.factor = std::max(disturbance.factor, fault.factor);
  }
  return disturbance;
}

std::optional<int> job_rank() {
  const char* text = std::getenv("RANK");
  if (!text) return std::nullopt;
  int rank = -1;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, rank);
  return error == std::errc() && stop == end && rank >= 0 ? std::optional(rank) : std::nullopt;
}

std::string arm_fault(std::string_view text) {
  const Fault fault = parse_fault(text);
  const auto rank = job_rank();
  if (fault.rank && fault.rank != rank) {
    throw FaultElsewhere(
        "it is meant for rank " + std::to_string(*fault.rank) + ", and this process " +
        (rank ? "is rank " + std::to_string(*rank) : "has no rank (RANK in its environment)"));
  }
  return arm(fault);
}

void arm_faults_of_environment() {
  const char* value = std::getenv("SOFTGPU_FAULTS");
  std::string_view rest = value ? value : "";
  while (!rest.empty()) {
    const std::string_view text = rest.substr(0, rest.find(';'));
    rest.remove_prefix(std::min(text.size() + 1, rest.size()));
    if (text.find_first_not_of(" \t") == std::string_view::npos) continue;
    try {
      const Fault fault = parse_fault(text);
      if (!fault.rank || fault.rank == job_rank()) arm(fault);
    } catch (const FaultSyntax& wrong) {
      throw CudaFailure{cudaErrorNoDevice,
                        "SOFTGPU_FAULTS holds '" + std::string(text) + "': " + wrong.what()};
    }
  }
}

}  // namespace softgpu

int softgpu_fault(const char* text, char* answer, std::size_t capacity) {
  int result = 0;
  std::string sentence;
  try {
    sentence = softgpu::arm_fault(text ? text : "");
  } catch (const std::exception& wrong) {
    result = -1;
    sentence = wrong.what();
  }
  if (answer && capacity > 0) std::snprintf(answer, capacity, "%s", sentence.c_str());
  return result;
}
