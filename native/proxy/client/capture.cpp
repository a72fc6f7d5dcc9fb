#include "proxy/client/capture.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <utility>

#include "proxy/client/connection.h"
#include "proxy/client/objects.h"
#include "proxy/client/thread.h"
#include "proxy_by_hand.h"

namespace jitckpt::proxy::client {
namespace {

struct Node {
  cudaGraphNodeType type;
  CapturedCall call;
  std::vector<Node*> dependencies;
};
using Nodes = std::vector<std::shared_ptr<Node>>;  // each behind those that it depends on

struct Capture {
  Capture(uint64_t origin, cudaStreamCaptureMode mode, unsigned long long id, int device)
      : origin(origin), mode(mode), id(id), device(device) {}

  uint64_t origin;
  cudaStreamCaptureMode mode;
  unsigned long long id;
  int device;
  std::thread::id thread = std::this_thread::get_id();
  std::shared_ptr<Nodes> nodes = std::make_shared<Nodes>();
  cudaGraph_t handle = reinterpret_cast<cudaGraph_t>(new_handle());
  bool invalidated = false, ended = false;
  std::map<uint64_t, std::vector<Node*>>
      ends;                           // of the streams that take part: what comes next depends on it
  std::vector<cudaGraphNode_t> told;  // what a program was told of these
  std::vector<cudaGraphEdgeData> told_edges;
};

struct Recorded {
  std::shared_ptr<Capture> capture;
  std::vector<Node*> after;
};

struct Executable {
  Nodes nodes;
  std::mutex launching;
  uint64_t stream = 0;     // of the newest launch
  cudaEvent_t launched{};  // behind it
};

std::atomic<int> under_way{0};
std::atomic<int> recorded_events{0};  // in captures that are under way, or were

// Never destroyed, as threads go on while the process exits.
struct All {
  std::mutex mutex;
  std::vector<std::shared_ptr<Capture>> captures;
  std::map<uint64_t, Recorded> events;
  std::map<cudaGraph_t, std::shared_ptr<Nodes>> graphs;
  std::map<cudaGraphExec_t, std::shared_ptr<Executable>> executables;
  unsigned long long newest_id = 0;
};
All& all() {
  static auto* const everything = new All;
  return *everything;
}

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

struct GroupedCall {
  cudaStream_t stream;
  CapturedCall call;
};
thread_local std::vector<GroupedCall> grouped;

bool is_legacy(uint64_t stream) { return stream == 0 || stream == number_of(cudaStreamLegacy); }

std::shared_ptr<Capture> capture_of(uint64_t stream) {
  for (const auto& one : all().captures) {
    if (one->ends.contains(stream)) return one;
  }
  return nullptr;
}

bool waits_for_legacy(uint64_t stream) {
  const auto made = made_by<wire::cudaStreamCreateWithPriority>(stream);
  return made && !(made->flags & cudaStreamNonBlocking);
}

// One that captures a stream for which the legacy stream would have to wait.
std::shared_ptr<Capture> in_the_way(uint64_t stream) {
  if (!is_legacy(stream)) return nullptr;
  for (const auto& one : all().captures) {
    if (one->device != this_thread().device) continue;
    if (std::ranges::any_of(one->ends, [](const auto& end) { return waits_for_legacy(end.first); }))
      return one;
  }
  return nullptr;
}

int32_t failed(Library library, cudaError_t error, std::string_view text) {
  return fail(library, in_words_of(library, error, ncclInvalidUsage, CUBLAS_STATUS_EXECUTION_FAILED), text);
}
cudaError_t failed(cudaError_t error, std::string_view text = "") {
  return cudaError_t(fail(Library::cudart, error, text));
}
cudaError_t refuse(Capture& capture, cudaError_t error, std::string_view text = "") {
  capture.invalidated = true;
  return failed(error, text);
}

void add_missing(std::vector<Node*>& to, const std::vector<Node*>& nodes) {
  for (Node* const node : nodes) {
    if (std::ranges::find(to, node) == to.end()) to.push_back(node);
  }
}

// All streams are captured into one graph. With the lock.
int32_t add_node(Library library, const std::vector<uint64_t>& streams, cudaGraphNodeType type,
                 CapturedCall call) {
  if (const auto other = in_the_way(streams[0])) {
    other->invalidated = true;
    return failed(library, cudaErrorStreamCaptureImplicit, "");
  }
  const auto capture = capture_of(streams[0]);
  if (!capture || capture->invalidated) return failed(library, cudaErrorStreamCaptureInvalidated, "");
  const auto node = std::make_shared<Node>(Node{type, std::move(call), {}});
  for (const uint64_t stream : streams) {
    if (capture_of(stream) != capture) {
      capture->invalidated = true;
      return failed(library, cudaErrorStreamCaptureMerge,
                    "not all streams of the call are captured into one graph");
    }
    add_missing(node->dependencies, capture->ends[stream]);
  }
  for (const uint64_t stream : streams) capture->ends[stream] = {node.get()};
  capture->nodes->push_back(node);
  return 0;
}

bool is_joined(Capture& capture) {
  const std::vector<Node*>& joined = capture.ends[capture.origin];
  std::unordered_set<const Node*> waited_for(joined.begin(), joined.end());
  for (const auto& node : *capture.nodes)
    waited_for.insert(node->dependencies.begin(), node->dependencies.end());
  return std::ranges::all_of(*capture.nodes,
                             [&](const auto& node) { return waited_for.contains(node.get()); });
}

// With the lock.
bool forbids_unsafe_calls() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  bool forbidden = false;
  for (const auto& one : all().captures) {
    const bool own = one->thread == std::this_thread::get_id() && one->mode != cudaStreamCaptureModeRelaxed;
    const bool global =
        thread_mode == cudaStreamCaptureModeGlobal && one->mode == cudaStreamCaptureModeGlobal;
    if (own || global) forbidden = one->invalidated = true;
  }
  return forbidden;
}

int32_t forbidden(bool condition, const char* text = "") {
  return condition ? int32_t(failed(cudaErrorStreamCaptureUnsupported, text)) : 0;
}

int32_t asks_stream(uint64_t stream) {
  if (const auto capture = capture_of(stream))
    return refuse(*capture, cudaErrorStreamCaptureUnsupported, "what the stream captures does not run");
  if (const auto other = in_the_way(stream)) return refuse(*other, cudaErrorStreamCaptureImplicit);
  return forbidden(forbids_unsafe_calls());
}

int32_t asks_event(uint64_t event) {
  if (const auto found = all().events.find(event); found != all().events.end())
    return refuse(*found->second.capture, cudaErrorCapturedEvent);
  return forbidden(forbids_unsafe_calls());
}

int32_t waits_for_device() {
  for (const auto& one : all().captures) {
    if (one->device == this_thread().device)
      return refuse(*one, cudaErrorStreamCaptureUnsupported, "a stream of the device captures");
  }
  return forbidden(forbids_unsafe_calls());
}

template <class Arguments>
Arguments arguments_of(Bytes bytes) {
  Arguments arguments;
  std::memcpy(&arguments, bytes.data(), sizeof arguments);
  return arguments;
}

cudaError_t no_such(const char* what) {
  return failed(cudaErrorInvalidValue, std::string("there is no such ") + what + " (any more)");
}

}  // namespace

bool captures(cudaStream_t stream) {
  if (under_way.load(std::memory_order_relaxed) == 0) [[likely]]
    return false;
  std::lock_guard lock(all().mutex);
  return capture_of(number_of(stream)) || in_the_way(number_of(stream));
}

bool captures_of_handle(uint64_t blas_handle) {
  if (under_way.load(std::memory_order_relaxed) == 0) [[likely]]
    return false;
  const auto set = setting<wire::cublasSetStream_v2>(blas_handle, Call::cublasSetStream_v2);
  return set && captures(reinterpret_cast<cudaStream_t>(set->streamId));
}

int32_t capture(Library library, cudaStream_t stream, cudaGraphNodeType type, CapturedCall call) {
  if (library == Library::nccl && this_thread().group_depth > 0) {
    grouped.push_back({stream, std::move(call)});
    return 0;
  }
  std::lock_guard lock(all().mutex);
  return add_node(library, {number_of(stream)}, type, std::move(call));
}

int32_t refuse_in_capture(Library library, cudaStream_t stream, int32_t error, std::string_view text) {
  std::lock_guard lock(all().mutex);
  if (const auto capture = capture_of(number_of(stream))) capture->invalidated = true;
  return fail(library, error, text);
}

bool capture_group(int32_t& result) {
  if (grouped.empty()) return false;
  std::vector<uint64_t> streams;
  for (const GroupedCall& one : grouped) streams.push_back(number_of(one.stream));
  std::lock_guard lock(all().mutex);
  result = add_node(Library::nccl, streams, cudaGraphNodeTypeKernel,
                    [calls = std::exchange(grouped, {})](cudaStream_t stream) {
                      int32_t outcome = ncclGroupStart();
                      for (const GroupedCall& one : calls) {
                        if (outcome == 0) outcome = one.call(stream);
                      }
                      const int32_t ended = ncclGroupEnd();
                      return outcome == 0 ? ended : outcome;
                    });
  return true;
}

cudaError_t record_in_capture(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  std::lock_guard lock(all().mutex);
  if (const auto other = in_the_way(number_of(stream))) return refuse(*other, cudaErrorStreamCaptureImplicit);
  const auto capture = capture_of(number_of(stream));
  if (!capture || capture->invalidated) return failed(cudaErrorStreamCaptureInvalidated);
  if (flags == cudaEventRecordExternal)
    return refuse(*capture, cudaErrorNotSupported, "the device proxy's graphs record no event for others");
  recorded_events += !all().events.contains(number_of(event));
  all().events[number_of(event)] = {capture, capture->ends[number_of(stream)]};
  return cudaSuccess;
}

void recorded_outside(uint64_t event) {
  if (recorded_events.load(std::memory_order_relaxed) == 0) [[likely]]
    return;
  std::lock_guard lock(all().mutex);
  recorded_events -= static_cast<int>(all().events.erase(event));
}

bool waits_in_capture(cudaStream_t stream, cudaEvent_t event) {
  if (captures(stream)) return true;
  if (recorded_events.load(std::memory_order_relaxed) == 0) [[likely]]
    return false;
  std::lock_guard lock(all().mutex);
  return all().events.contains(number_of(event));
}

cudaError_t wait_in_capture(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  const uint64_t stream = number_of(handle);
  std::lock_guard lock(all().mutex);
  const auto own = capture_of(stream);
  const auto recorded = all().events.find(number_of(event));
  if (recorded == all().events.end()) {
    if (!own) return failed(cudaErrorStreamCaptureImplicit);  // the legacy stream, in the way of a capture
    if (flags == cudaEventWaitExternal)
      return refuse(*own, cudaErrorNotSupported, "the device proxy's graphs wait for no event from outside");
    int32_t result = 0;
    Connection* const connection = Connection::get(Library::cudart, result);
    if (!connection) return cudaError_t(result);
    const bool was_recorded = connection->objects().recorded(number_of(event)).number != 0;
    return was_recorded ? refuse(*own, cudaErrorStreamCaptureIsolation) : cudaSuccess;
  }
  Capture& capture = *recorded->second.capture;
  if (capture.ended)
    return failed(cudaErrorCapturedEvent, "the capture in which the event was recorded has ended");
  if (capture.invalidated) return failed(cudaErrorStreamCaptureInvalidated);
  if (is_legacy(stream)) return refuse(capture, cudaErrorStreamCaptureImplicit);
  if (own && own.get() != &capture) {
    own->invalidated = true;
    return refuse(capture, cudaErrorStreamCaptureMerge);
  }
  add_missing(capture.ends[stream], recorded->second.after);
  return cudaSuccess;
}

int32_t forbidden_in_capture(Call call, Bytes arguments) {
  if (under_way.load(std::memory_order_relaxed) == 0 && recorded_events.load(std::memory_order_relaxed) == 0)
      [[likely]]
    return 0;
  std::lock_guard lock(all().mutex);
  switch (call) {
    case Call::cudaStreamSynchronize:
      return asks_stream(arguments_of<wire::cudaStreamSynchronize>(arguments).stream);
    case Call::cudaStreamQuery:
      return asks_stream(arguments_of<wire::cudaStreamQuery>(arguments).stream);
    case Call::cudaEventSynchronize:
      return asks_event(arguments_of<wire::cudaEventSynchronize>(arguments).event);
    case Call::cudaEventQuery:
      return asks_event(arguments_of<wire::cudaEventQuery>(arguments).event);
    case Call::cudaDeviceSynchronize:
      return waits_for_device();
    case Call::allocate:
    case Call::cudaFree:
    case Call::register_host:
    case Call::unregister_host:
      return forbidden(forbids_unsafe_calls());
    default:
      return 0;
  }
}

cudaError_t forbidden_while_capturing() {
  if (under_way.load(std::memory_order_relaxed) == 0) [[likely]]
    return cudaSuccess;
  std::lock_guard lock(all().mutex);
  return cudaError_t(forbidden(forbids_unsafe_calls()));
}

namespace {

// Behind the launch before, if that was on another stream: one and the same graph never runs twice at a time.
cudaError_t launch(Executable& graph, cudaStream_t stream) {
  const bool inlined = captures(stream);
  std::lock_guard lock(graph.launching);
  cudaError_t result = cudaSuccess;
  if (!inlined && graph.launched && graph.stream != number_of(stream))
    result = cudaStreamWaitEvent(stream, graph.launched, cudaEventWaitDefault);
  for (const auto& node : graph.nodes) {
    if (result != cudaSuccess) return result;
    if (const int32_t failure = node->call(stream); failure != 0) return newest_error();
  }
  if (inlined || result != cudaSuccess) return result;
  if (!graph.launched) result = cudaEventCreateWithFlags(&graph.launched, cudaEventDisableTiming);
  graph.stream = number_of(stream);
  return result == cudaSuccess ? cudaEventRecord(graph.launched, stream) : result;
}

}  // namespace
}  // namespace jitckpt::proxy::client

using namespace jitckpt::proxy;
using namespace jitckpt::proxy::client;

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  const uint64_t stream = number_of(handle);
  if (mode < cudaStreamCaptureModeGlobal || mode > cudaStreamCaptureModeRelaxed)
    return failed(cudaErrorInvalidValue, "unknown capture mode");
  if (is_legacy(stream))
    return failed(cudaErrorStreamCaptureUnsupported, "the legacy default stream can't capture");
  if (stream < wire::named_streams)
    return failed(cudaErrorNotSupported, "the device proxy captures no thread's default stream");
  if (!made_by<wire::cudaStreamCreateWithPriority>(stream))
    return failed(cudaErrorInvalidResourceHandle, "there is no such stream (any more)");
  std::lock_guard lock(all().mutex);
  if (capture_of(stream)) return failed(cudaErrorIllegalState, "the stream captures already");
  auto capture = std::make_shared<Capture>(stream, mode, ++all().newest_id, this_thread().device);
  capture->ends[stream];
  all().graphs[capture->handle] = capture->nodes;
  all().captures.push_back(std::move(capture));
  ++under_way;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  if (!graph) return no_place<cudaError_t>();
  *graph = nullptr;
  std::lock_guard lock(all().mutex);
  const auto capture = capture_of(number_of(handle));
  if (!capture) return failed(cudaErrorIllegalState, "the stream does not capture");
  if (capture->origin != number_of(handle)) return refuse(*capture, cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return failed(cudaErrorStreamCaptureWrongThread);
  const cudaError_t error = capture->invalidated  ? cudaErrorStreamCaptureInvalidated
                            : is_joined(*capture) ? cudaSuccess
                                                  : cudaErrorStreamCaptureUnjoined;
  capture->ended = true;
  capture->nodes.reset();
  capture->ends.clear();
  std::erase(all().captures, capture);
  --under_way;
  if (error == cudaSuccess) {
    *graph = capture->handle;
    return error;
  }
  all().graphs.erase(capture->handle);
  return failed(error);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  if (!status) return no_place<cudaError_t>();
  *status = cudaStreamCaptureStatusNone;
  if (under_way.load(std::memory_order_relaxed) == 0) return cudaSuccess;
  std::lock_guard lock(all().mutex);
  if (in_the_way(number_of(stream))) return failed(cudaErrorStreamCaptureImplicit);
  const auto capture = capture_of(number_of(stream));
  if (!capture) return cudaSuccess;
  *status = capture->invalidated ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  if (capture->invalidated) return cudaSuccess;
  const std::vector<Node*>& after = capture->ends[number_of(stream)];
  capture->told.clear();
  for (Node* const node : after) capture->told.push_back(reinterpret_cast<cudaGraphNode_t>(node));
  capture->told_edges.assign(after.size(), {});
  if (id) *id = capture->id;
  if (graph) *graph = capture->handle;
  if (dependencies) *dependencies = capture->told.data();
  if (edges) *edges = capture->told_edges.data();
  if (count) *count = after.size();
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  if (!mode) return no_place<cudaError_t>();
  std::swap(thread_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (!count) return no_place<cudaError_t>();
  std::lock_guard lock(all().mutex);
  const auto found = all().graphs.find(graph);
  if (found == all().graphs.end()) return no_such("graph");
  const Nodes& there = *found->second;
  if (nodes) {
    const std::size_t room = *count;
    for (std::size_t i = 0; i < room; ++i)
      nodes[i] = i < there.size() ? reinterpret_cast<cudaGraphNode_t>(there[i].get()) : nullptr;
    *count = std::min(room, there.size());
  } else {
    *count = there.size();
  }
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  std::lock_guard lock(all().mutex);
  return all().graphs.erase(graph) == 1 ? cudaSuccess : no_such("graph");
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
  if (!made) return no_place<cudaError_t>();
  if (flags & cudaGraphInstantiateFlagDeviceLaunch)
    return client::refuse<cudaError_t>("cudaGraphInstantiateFlagDeviceLaunch");
  std::lock_guard lock(all().mutex);
  const auto found = all().graphs.find(graph);
  if (found == all().graphs.end()) return no_such("graph");
  auto executable = std::make_shared<Executable>();
  executable->nodes = *found->second;
  *made = reinterpret_cast<cudaGraphExec_t>(executable.get());
  all().executables[*made] = std::move(executable);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph,
                                          unsigned long long flags) {
  return cudaGraphInstantiate(made, graph, flags);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  std::shared_ptr<Executable> ended;
  {
    std::lock_guard lock(all().mutex);
    const auto found = all().executables.extract(executable);
    if (found.empty()) return no_such("executable graph");
    ended = found.mapped();
  }
  return ended->launched ? cudaEventDestroy(ended->launched) : cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  std::shared_ptr<Executable> graph;
  {
    std::lock_guard lock(all().mutex);
    const auto found = all().executables.find(executable);
    if (found == all().executables.end()) return no_such("executable graph");
    graph = found->second;
  }
  return launch(*graph, stream);
}
