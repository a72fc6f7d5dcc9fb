// Copies of the state that stays on the device, for a minibatch in which a call may write to it.
#include <cstring>
#include <optional>
#include <set>
#include <vector>

#include "proxy/server/images.h"
#include "proxy/server/services.h"
#include "real_calls.h"

namespace jitckpt::proxy {
namespace {

constexpr std::size_t part_bytes = 1024 * 1024;  // that are compared at one time

// Whether a place is still as its copy.
cudaError_t compare(const wire::Range& range, std::vector<std::byte>& part, bool& same) {
  choose_device(range.device);
  for (uint64_t done = 0; same && done < range.bytes; done += part_bytes) {
    const std::size_t bytes = std::min<std::size_t>(part_bytes, range.bytes - done);
    cudaError_t error = real::cudaMemcpyAsync(part.data(), reinterpret_cast<const void*>(range.from + done),
                                              bytes, cudaMemcpyDeviceToHost, nullptr);
    if (error == cudaSuccess) error = real::cudaStreamSynchronize(nullptr);
    if (error != cudaSuccess) return error;
    same = std::memcmp(part.data(), reinterpret_cast<const void*>(range.to + done), bytes) == 0;
  }
  return cudaSuccess;
}

}  // namespace

// By the reader itself, as images are. What a freeze lets fail does not matter here: nothing that has been
// made in this minibatch writes to the state.
int32_t serve_save_state(Request& request) {
  const auto arguments = request.arguments<wire::save_state>();
  const auto ranges = entries_after<wire::save_state, wire::Range>(request, arguments.ranges);
  ControlBlock& control = request.server.control();
  Steps& steps = request.server.steps;
  if (control.state_saved < arguments.state) {
    const std::set<int32_t> devices = devices_of(ranges);
    cudaError_t error = come_to_rest(devices, request.server);
    const bool failed = error != cudaSuccess || request.server.has_failed();
    if (!failed && control.images != Images::unwanted) {
      error = copy_image(ranges);
      if (error == cudaSuccess) error = synchronize(devices);
    }
    if (failed || error != cudaSuccess) {
      // Calls behind it tell the program of the failure. Nothing may change what all will go back to.
      if (control.images != Images::unwanted) steps.spare();
      return error;
    }
    control.state_saved = arguments.state;
  }
  steps.change();
  return cudaSuccess;
}

namespace {

// Nothing where a failure has come before: who asked is told of that, and asks again.
cudaError_t compare_all(Server& server, const std::vector<wire::Range>& ranges, std::optional<bool>& same) {
  if (const cudaError_t error = come_to_rest(devices_of(ranges), server); error != cudaSuccess) return error;
  if (server.has_failed() || server.control().images == Images::unwanted) return cudaSuccess;
  std::vector<std::byte> part(part_bytes);
  bool all_same = true;
  for (const wire::Range& range : ranges) {
    if (const cudaError_t error = compare(range, part, all_same); error != cudaSuccess) return error;
  }
  same = all_same;
  return cudaSuccess;
}

}  // namespace

int32_t serve_compare_state(Request& request) {
  const auto arguments = request.arguments<wire::compare_state>();
  std::optional<bool> same;
  const cudaError_t error = compare_all(
      request.server, entries_after<wire::compare_state, wire::Range>(request, arguments.ranges), same);
  request.answer<wire::compare_state_answer>() = {same.has_value(), same.value_or(false)};
  return error;
}

int32_t serve_look_at_state(Request& request) {
  const auto arguments = request.arguments<wire::look_at_state>();
  std::optional<bool> same;
  const cudaError_t error = compare_all(
      request.server, entries_after<wire::look_at_state, wire::Range>(request, arguments.ranges), same);
  if (same)
    *reinterpret_cast<wire::Found*>(arguments.found) = *same ? wire::Found::same : wire::Found::different;
  return error;
}

}  // namespace jitckpt::proxy
