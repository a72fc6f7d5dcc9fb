#include "interpose/observers.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "interpose/copies.h"
#include "interpose/entry.h"
#include "interpose/job.h"
#include "interpose/library.h"
#include "real_calls.h"
#include "watchdog/device.h"

namespace jitckpt::interpose::observe {
namespace {

std::atomic<int> armed_signal{0};

// NCCL's groups are per thread.
thread_local constinit int group_depth = 0;
thread_local std::vector<ObservedOperation> group;

// While somebody wants to know when the network is used: where the next call, or group of calls, begins on a
// stream.
thread_local std::vector<std::pair<cudaStream_t, watchdog::Event>> begun;

void recycle_time(watchdog::Event event) { library().device.times.give_back(event); }

std::optional<watchdog::Event> take_begun(cudaStream_t stream) {
  const auto found =
      std::find_if(begun.begin(), begun.end(), [&](const auto& one) { return one.first == stream; });
  if (found == begun.end()) return std::nullopt;
  const watchdog::Event event = found->second;
  begun.erase(found);
  return event;
}

void forget_begun() {
  for (const auto& [stream, event] : begun) recycle_time(event);
  begun.clear();
}

size_t bytes_of(ncclDataType_t datatype) {
  switch (datatype) {
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 1;
  }
}

// The operations that graphs have. Never destroyed: threads go on while the process exits.
struct Graphs {
  std::mutex mutex;
  std::unordered_map<cudaGraph_t, std::vector<ObservedOperation>> captured;
  std::unordered_map<cudaGraphExec_t, std::vector<ObservedOperation>> executables;
};
Graphs& graphs() {
  static auto* const all = new Graphs;
  return *all;
}

void watch_when_launched(const ObservedOperation& operation) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  const cudaError_t asked =
      real::cudaStreamGetCaptureInfo(operation.stream, &status, nullptr, &graph, nullptr, nullptr, nullptr);
  if (asked != cudaSuccess || status != cudaStreamCaptureStatusActive) return;
  const std::lock_guard lock(graphs().mutex);
  graphs().captured[graph].push_back(operation);
}

void made_executable(cudaError_t result, const cudaGraphExec_t* executable, cudaGraph_t graph) {
  if (result != cudaSuccess) return;
  const std::lock_guard lock(graphs().mutex);
  const auto found = graphs().captured.find(graph);
  if (found != graphs().captured.end()) graphs().executables[*executable] = found->second;
}

void arm(const ObservedOperation& operation, const watchdog::Watch& watch) {
  LibraryState& all = library();
  const int device = all.device.streams.device_of(operation.stream);
  all.device.streams.used_device(device);
  const auto event = all.device.events.record(operation.stream, device);
  if (!event) return;
  all.device.watches.arm(operation.stream, watch, *event, all.device.clock.now());
}

void watch(const ObservedOperation& operation) {
  const watchdog::Watch watch = library().communicators.next(operation);
  // While capturing nothing runs, and an event would become part of the graph.
  if (watchdog::is_capturing(operation.stream)) {
    watch_when_launched(operation);
  } else {
    arm(operation, watch);
  }
}

void profile(cudaStream_t stream, bool exchange) {
  const auto begin = take_begun(stream);
  if (!begin) return;
  watchdog::DeviceWork& work = library().device;
  const auto end = work.times.record(stream, begin->device);
  if (!end) {
    recycle_time(*begin);
  } else if (work.network.is_on()) {
    work.network.busy(*begin, *end, exchange, recycle_time);
  } else {
    work.use.add(stream, *begin, *end, recycle_time);
  }
}

void watch_or_postpone(ncclResult_t result, const std::vector<ObservedOperation>& operations) {
  for (const ObservedOperation& operation : operations) {
    if (result == ncclInProgress) {
      library().communicators.postpone(operation);
    } else {
      if (!begun.empty()) profile(operation.stream, !operation.exchanges.empty());
      watch(operation);
    }
    if (operation.stream == library().step_stream)
      copies::pass_point(watchdog::Mark::wait_ends, operation.stream);
  }
  // Of what was postponed nobody knows when it ends.
  if (!begun.empty()) forget_begun();
}

// One operation a stream: a group runs as one kernel there, and ends at once.
std::vector<ObservedOperation> merged_by_stream(const std::vector<ObservedOperation>& operations) {
  std::vector<ObservedOperation> merged;
  for (const ObservedOperation& operation : operations) {
    const auto same = std::find_if(merged.begin(), merged.end(),
                                   [&](const auto& other) { return other.stream == operation.stream; });
    if (same == merged.end()) {
      merged.push_back(operation);
    } else {
      same->bytes += operation.bytes;
      ++same->calls;
      // With a collective among them it is one.
      if (operation.exchanges.empty()) same->exchanges.clear();
      if (same->exchanges.empty()) continue;
      same->exchanges.insert(same->exchanges.end(), operation.exchanges.begin(), operation.exchanges.end());
    }
  }
  return merged;
}

void fire_fault() {
  if (armed_signal.load(std::memory_order_relaxed) == 0) return;
  const int signal_number = armed_signal.exchange(0);
  if (signal_number != 0) kill(getpid(), signal_number);
}

int current_device() {
  int device = 0;
  real::cudaGetDevice(&device);
  return device;
}

// Whether a device library calls this function inside of another one of its own, which comes by here because
// libraries bind to preloaded symbols. What that means is told by the outer call. own: calls that are marked
// as this one itself.
bool is_inside_a_call(int own) {
  const watchdog::Thread* const thread = watchdog::current_thread;
  return thread && thread->depth > own;
}

bool worked(ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; }

void created(cudaError_t result, cudaStream_t* stream) {
  if (result == cudaSuccess) library().device.streams.created(*stream, current_device());
}

}  // namespace

void arm_fault(int signal_number) { armed_signal.store(signal_number); }

void before_collective(cudaStream_t stream) {
  LibraryState& all = library();
  // A group is one point, at its first call. On the training's own stream that waits for the others.
  if (group.empty() && !is_inside_a_call(1))
    copies::pass_point(stream == all.step_stream ? watchdog::Mark::wait_begins : watchdog::Mark::collective,
                       stream);
  if (!all.device.network.is_on() && !all.device.use.is_wanted()) [[likely]]
    return;
  const auto is_same = [&](const auto& one) { return one.first == stream; };
  if (std::any_of(begun.begin(), begun.end(), is_same) || watchdog::is_capturing(stream)) return;
  if (const auto event = all.device.times.record(stream, all.device.streams.device_of(stream)))
    begun.emplace_back(stream, *event);
}

void collective(ncclResult_t result, const char* name, ncclComm_t communicator, size_t count,
                ncclDataType_t datatype, cudaStream_t stream, int peer) {
  if (is_inside_a_call(1)) return;
  if (result != ncclSuccess && result != ncclInProgress) {
    forget_begun();
    if (const auto job = current_job()) job->call_failed(name, result);
    return;
  }
  ObservedOperation operation{name, communicator, stream, count * bytes_of(datatype)};
  if (peer >= 0) operation.exchanges.push_back({.send = name == std::string_view("ncclSend"), .peer = peer});
  if (group_depth > 0) {
    group.push_back(operation);
    return;
  }
  watch_or_postpone(result, {operation});
  fire_fault();
}

void ncclGroupStart(ncclResult_t result) {
  if (result == ncclSuccess) ++group_depth;
}

void ncclGroupEnd(ncclResult_t result) {
  if (group_depth > 0 && --group_depth > 0) return;
  const std::vector<ObservedOperation> operations = merged_by_stream(group);
  group.clear();
  if (operations.empty()) return;
  if (result != ncclSuccess && result != ncclInProgress) forget_begun();
  if (result != ncclSuccess && result != ncclInProgress) {
    if (const auto job = current_job()) job->call_failed("ncclGroupEnd", result);
    return;
  }
  watch_or_postpone(result, operations);
  fire_fault();
}

void ncclGroupSimulateEnd(ncclResult_t, ncclSimInfo_t*) {
  if (group_depth > 0 && --group_depth > 0) return;
  group.clear();
}

void ncclCommInitRank(ncclResult_t result, ncclComm_t* comm, int, ncclUniqueId commId, int) {
  if (worked(result)) library().communicators.made(*comm, &commId, 1);
}
void ncclCommInitRankConfig(ncclResult_t result, ncclComm_t* comm, int, ncclUniqueId commId, int,
                            ncclConfig_t*) {
  if (worked(result)) library().communicators.made(*comm, &commId, 1);
}
void ncclCommInitRankScalable(ncclResult_t result, ncclComm_t* newcomm, int, int, int nId,
                              ncclUniqueId* commIds, ncclConfig_t*) {
  if (worked(result)) library().communicators.made(*newcomm, commIds, nId);
}
void ncclCommSplit(ncclResult_t result, ncclComm_t comm, int color, int, ncclComm_t* newcomm, ncclConfig_t*) {
  if (!worked(result)) return;
  const bool in_none = color == NCCL_SPLIT_NOCOLOR;
  library().communicators.made_from(comm, in_none ? nullptr : *newcomm, static_cast<uint64_t>(color));
}
void ncclCommShrink(ncclResult_t result, ncclComm_t comm, int*, int, ncclComm_t* newcomm, ncclConfig_t*,
                    int) {
  constexpr uint64_t no_color = uint64_t{1} << 32;
  if (worked(result)) library().communicators.made_from(comm, *newcomm, no_color);
}

void ncclCommDestroy(ncclComm_t comm) { library().communicators.forget(comm); }
void ncclCommAbort(ncclComm_t comm) { library().communicators.forget(comm); }

void ncclCommGetAsyncError(ncclResult_t result, ncclComm_t comm, ncclResult_t* asyncError) {
  if (result != ncclSuccess || !attentive() || is_inside_a_call(0)) return;
  if (*asyncError == ncclSuccess) {
    for (const ObservedOperation& operation : library().communicators.take_postponed(comm)) watch(operation);
  } else if (*asyncError != ncclInProgress) {
    const auto job = current_job();
    // c10d would abort its communicators and end the process before anything is saved.
    if (job && job->communicator_failed(comm, *asyncError)) *asyncError = ncclSuccess;
  }
}

// Who has memory on a device may use its default stream.
void cudaMalloc(cudaError_t result, void**, size_t) {
  if (result == cudaSuccess) library().device.streams.used_device(current_device());
}

void cudaStreamCreate(cudaError_t result, cudaStream_t* pStream) { created(result, pStream); }
void cudaStreamCreateWithFlags(cudaError_t result, cudaStream_t* pStream, unsigned int) {
  created(result, pStream);
}
void cudaStreamCreateWithPriority(cudaError_t result, cudaStream_t* pStream, unsigned int, int) {
  created(result, pStream);
}

// Where the training's own stream waits it may be idle.
void before_cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned int) {
  if (stream == library().step_stream && !is_inside_a_call(0))
    copies::pass_point(watchdog::Mark::wait_begins, stream);
}
void cudaStreamWaitEvent(cudaError_t, cudaStream_t stream, cudaEvent_t, unsigned int) {
  if (stream == library().step_stream && !is_inside_a_call(0))
    copies::pass_point(watchdog::Mark::wait_ends, stream);
}

void cudaGraphDestroy(cudaGraph_t graph) {
  const std::lock_guard lock(graphs().mutex);
  graphs().captured.erase(graph);
}

// What is known of another graph with this handle, whose capture came to nothing, is over.
void cudaStreamBeginCapture(cudaError_t result, cudaStream_t stream, cudaStreamCaptureMode) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  if (result == cudaSuccess && real::cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, nullptr,
                                                              nullptr, nullptr) == cudaSuccess)
    observe::cudaGraphDestroy(graph);
}

void cudaGraphInstantiate(cudaError_t result, cudaGraphExec_t* executable, cudaGraph_t graph,
                          unsigned long long) {
  made_executable(result, executable, graph);
}
void cudaGraphInstantiateWithFlags(cudaError_t result, cudaGraphExec_t* executable, cudaGraph_t graph,
                                   unsigned long long) {
  made_executable(result, executable, graph);
}
void cudaGraphExecDestroy(cudaGraphExec_t executable) {
  const std::lock_guard lock(graphs().mutex);
  graphs().executables.erase(executable);
}

// All collectives of a graph are watched as one, the last, which is over when the graph is.
void cudaGraphLaunch(cudaError_t result, cudaGraphExec_t executable, cudaStream_t stream) {
  if (result != cudaSuccess || is_inside_a_call(1)) return;
  std::vector<ObservedOperation> operations;
  {
    const std::lock_guard lock(graphs().mutex);
    const auto found = graphs().executables.find(executable);
    if (found == graphs().executables.end()) return;
    operations = found->second;
  }
  watchdog::Watch last;
  uint64_t bytes = 0;
  for (ObservedOperation& operation : operations) {
    operation.stream = stream;
    last = library().communicators.next(operation);
    bytes += operation.bytes;
  }
  last.bytes = bytes;
  last.calls = static_cast<uint32_t>(operations.size());
  last.in_graph = true;
  if (watchdog::is_capturing(stream)) {
    for (const ObservedOperation& operation : operations) watch_when_launched(operation);
  } else {
    arm(operations.back(), last);
  }
}

void cudaStreamDestroy(cudaStream_t stream) {
  library().device.streams.destroyed(stream);
  library().device.watches.forget_stream(stream);
}

}  // namespace jitckpt::interpose::observe
