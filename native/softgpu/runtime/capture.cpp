#include "softgpu/runtime/capture.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <utility>

#include "softgpu/runtime/stream_functions.h"

namespace softgpu {

std::atomic<int> captures_under_way{0};

class Capture {
 public:
  Capture(std::shared_ptr<Stream> origin, cudaStreamCaptureMode mode)
      : origin(std::move(origin)), mode(mode), ends{{this->origin, {}}} {
    static std::atomic<unsigned long long> newest{0};
    id = ++newest;
  }

  const std::shared_ptr<Stream> origin;
  const cudaStreamCaptureMode mode;
  const std::thread::id thread = std::this_thread::get_id();
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  const cudaGraph_t handle = add_graph(graph);
  unsigned long long id;
  bool invalidated = false, ended = false;

  // The streams that take part, and what the next node of each depends on.
  std::map<std::shared_ptr<Stream>, std::vector<Node*>> ends;

  // What a program was told of its stream's dependencies, until it asks again.
  std::vector<cudaGraphNode_t> told;
  std::vector<cudaGraphEdgeData> told_edges;
};

namespace {

// Of all captures: each is short, and they are rare.
std::mutex capturing;

std::vector<std::shared_ptr<Capture>>& all() {
  static auto* const captures = new std::vector<std::shared_ptr<Capture>>;
  return *captures;
}

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

[[noreturn]] void refuse(Capture& capture, cudaError_t error, const char* text) {
  capture.invalidated = true;
  throw CudaFailure{error, text};
}

// Null for a stream that does not capture.
std::shared_ptr<Capture> capture_of(Stream& stream) {
  for (const auto& capture : all()) {
    if (capture->ends.contains(stream.shared_from_this())) return capture;
  }
  return nullptr;
}

std::shared_ptr<Capture> valid_capture_of(Stream& stream) {
  auto capture = capture_of(stream);
  require(!capture || !capture->invalidated, cudaErrorStreamCaptureInvalidated, "");
  return capture;
}

bool is_legacy(const Stream& stream) { return &stream == stream.device.legacy_stream().get(); }

// One that captures a stream for which the legacy stream would have to wait.
std::shared_ptr<Capture> capture_in_the_way(Stream& stream) {
  if (!is_legacy(stream)) return nullptr;
  for (const auto& capture : all()) {
    for (const auto& [other, after] : capture->ends) {
      if (&other->device == &stream.device && !(other->flags & cudaStreamNonBlocking)) return capture;
    }
  }
  return nullptr;
}

void forbid_legacy_stream(Stream& stream) {
  if (const auto capture = capture_in_the_way(stream)) refuse(*capture, cudaErrorStreamCaptureImplicit, "");
}

void forbid_unsafe(const char* text) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return;
  const auto forbids = [](const Capture& capture) {
    if (capture.thread == std::this_thread::get_id() && capture.mode != cudaStreamCaptureModeRelaxed)
      return true;
    return thread_mode == cudaStreamCaptureModeGlobal && capture.mode == cudaStreamCaptureModeGlobal;
  };
  bool forbidden = false;
  for (const auto& capture : all()) {
    if (!forbids(*capture)) continue;
    forbidden = capture->invalidated = true;
  }
  require(!forbidden, cudaErrorStreamCaptureUnsupported, text);
}

bool is_joined(const Capture& capture) {
  const std::vector<Node*>& joined = capture.ends.at(capture.origin);
  std::unordered_set<const Node*> waited_for(joined.begin(), joined.end());
  for (const auto& node : capture.graph->nodes)
    waited_for.insert(node->dependencies.begin(), node->dependencies.end());
  return std::all_of(capture.graph->nodes.begin(), capture.graph->nodes.end(),
                     [&](const auto& node) { return waited_for.contains(node.get()); });
}

void add_missing(std::vector<Node*>& to, const std::vector<Node*>& nodes) {
  for (Node* const node : nodes) {
    if (std::find(to.begin(), to.end(), node) == to.end()) to.push_back(node);
  }
}

void end(const std::shared_ptr<Capture>& capture) {
  capture->ended = true;
  capture->graph.reset();  // events that were recorded in it may keep the rest for long
  capture->ends.clear();
  std::erase(all(), capture);
  captures_under_way.fetch_sub(1);
}

}  // namespace

bool captures_now(Stream& stream) {
  const std::lock_guard lock(capturing);
  forbid_legacy_stream(stream);
  return valid_capture_of(stream) != nullptr;
}

void forbid_unsafe_call_now() {
  const std::lock_guard lock(capturing);
  forbid_unsafe("");
}

void forbid_asking_now(Stream& stream) {
  const std::lock_guard lock(capturing);
  if (const auto capture = capture_of(stream))
    refuse(*capture, cudaErrorStreamCaptureUnsupported, "what the stream captures does not run");
  forbid_legacy_stream(stream);
  forbid_unsafe("");
}

void forbid_waiting_now(Device& device) {
  const std::lock_guard lock(capturing);
  for (const auto& capture : all()) {
    for (const auto& [stream, after] : capture->ends) {
      if (&stream->device == &device)
        refuse(*capture, cudaErrorStreamCaptureUnsupported, "a stream of the device captures");
    }
  }
  forbid_unsafe("");
}

void add_node(const std::vector<Stream*>& streams, cudaGraphNodeType type, std::string_view text,
              WorkMaker make) {
  const std::lock_guard lock(capturing);
  const auto capture = valid_capture_of(*streams[0]);
  require(capture != nullptr, cudaErrorStreamCaptureInvalidated, "the capture has ended meanwhile");
  const auto node = std::make_shared<Node>(Node{type, std::string(text), std::move(make), {}});
  for (Stream* const stream : streams) {
    if (capture_of(*stream) != capture)
      refuse(*capture, cudaErrorStreamCaptureMerge,
             "not all streams of the call are captured into one graph");
    add_missing(node->dependencies, capture->ends[stream->shared_from_this()]);
  }
  for (Stream* const stream : streams) capture->ends[stream->shared_from_this()] = {node.get()};
  capture->graph->nodes.push_back(node);
  add_node_handle(node);
}

void refuse_in_capture(Stream& stream, cudaError_t error, const char* text) {
  const std::lock_guard lock(capturing);
  if (const auto capture = capture_of(stream)) refuse(*capture, error, text);
  throw CudaFailure{error, text};
}

CapturedPoint captured_end(Stream& stream) {
  const std::lock_guard lock(capturing);
  auto capture = valid_capture_of(stream);
  require(capture != nullptr, cudaErrorStreamCaptureInvalidated, "the capture has ended meanwhile");
  std::vector<Node*> after = capture->ends[stream.shared_from_this()];
  return {std::move(capture), std::move(after)};
}

void wait_in_capture(Stream& stream, const CapturedPoint& point) {
  const std::lock_guard lock(capturing);
  Capture& capture = *point.capture;
  require(!capture.ended, cudaErrorCapturedEvent, "the capture in which the event was recorded has ended");
  require(!capture.invalidated, cudaErrorStreamCaptureInvalidated, "");
  if (is_legacy(stream)) refuse(capture, cudaErrorStreamCaptureImplicit, "");
  const auto own = capture_of(stream);
  if (own && own != point.capture) {
    own->invalidated = true;
    refuse(capture, cudaErrorStreamCaptureMerge, "");
  }
  add_missing(capture.ends[stream.shared_from_this()], point.after);
}

void refuse_captured_event(const CapturedPoint& point) {
  const std::lock_guard lock(capturing);
  refuse(*point.capture, cudaErrorCapturedEvent, "");
}

}  // namespace softgpu

using namespace softgpu;

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  return device_call([&](Device&) {
    require(mode >= cudaStreamCaptureModeGlobal && mode <= cudaStreamCaptureModeRelaxed,
            cudaErrorInvalidValue, "unknown capture mode");
    const auto stream = find_stream(handle);
    require(!is_legacy(*stream), cudaErrorStreamCaptureUnsupported,
            "the legacy default stream can't capture");
    const std::lock_guard lock(capturing);
    require(!capture_of(*stream), cudaErrorIllegalState, "the stream captures already");
    all().push_back(std::make_shared<Capture>(stream, mode));
    captures_under_way.fetch_add(1);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  return device_call([&](Device&) {
    require_place(graph);
    *graph = nullptr;
    const auto stream = find_stream(handle);
    const std::lock_guard lock(capturing);
    const auto capture = capture_of(*stream);
    require(capture != nullptr, cudaErrorIllegalState, "the stream does not capture");
    if (capture->origin != stream) refuse(*capture, cudaErrorStreamCaptureUnmatched, "");
    require(capture->mode == cudaStreamCaptureModeRelaxed || capture->thread == std::this_thread::get_id(),
            cudaErrorStreamCaptureWrongThread, "");
    const cudaError_t error = capture->invalidated  ? cudaErrorStreamCaptureInvalidated
                              : is_joined(*capture) ? cudaSuccess
                                                    : cudaErrorStreamCaptureUnjoined;
    end(capture);
    if (error == cudaSuccess) {
      *graph = capture->handle;
    } else {
      remove_graph(capture->handle);
    }
    return error;
  });
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges,
                                     size_t* dependency_count) {
  return device_call([&](Device&) {
    require_place(status);
    const auto stream = find_stream(handle);
    *status = cudaStreamCaptureStatusNone;
    if (captures_under_way.load(std::memory_order_relaxed) == 0) return cudaSuccess;
    const std::lock_guard lock(capturing);
    require(!capture_in_the_way(*stream), cudaErrorStreamCaptureImplicit, "");
    const auto capture = capture_of(*stream);
    if (!capture) return cudaSuccess;
    *status = capture->invalidated ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    if (capture->invalidated) return cudaSuccess;
    const std::vector<Node*>& after = capture->ends[stream];
    capture->told.clear();
    for (Node* const node : after) capture->told.push_back(handle_of(node));
    capture->told_edges.assign(after.size(), {});
    if (id) *id = capture->id;
    if (graph) *graph = capture->handle;
    if (dependencies) *dependencies = capture->told.data();
    if (edges) *edges = capture->told_edges.data();
    if (dependency_count) *dependency_count = after.size();
    return cudaSuccess;
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t handle, cudaGraphNode_t* dependencies,
                                                const cudaGraphEdgeData*, size_t count, unsigned flags) {
  return device_call([&](Device&) {
    require(flags <= cudaStreamSetCaptureDependencies, cudaErrorInvalidValue, "unknown flags");
    require(dependencies != nullptr || count == 0, cudaErrorInvalidValue, "no nodes to depend on");
    std::vector<Node*> nodes;
    for (std::size_t i = 0; i < count; ++i) nodes.push_back(&find_node(dependencies[i]));
    const auto stream = find_stream(handle);
    const std::lock_guard lock(capturing);
    const auto capture = valid_capture_of(*stream);
    require(capture != nullptr, cudaErrorIllegalState, "the stream does not capture");
    std::vector<Node*>& after = capture->ends[stream];
    if (flags == cudaStreamSetCaptureDependencies) after.clear();
    add_missing(after, nodes);
    return cudaSuccess;
  });
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return call([&] {
    require(mode != nullptr, cudaErrorInvalidValue, "no mode to exchange");
    std::swap(thread_mode, *mode);
    return cudaSuccess;
  });
}
