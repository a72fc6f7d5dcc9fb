// Stream capture: what is put on a capturing stream does not run, it becomes a node of a graph.
#pragma once
#include <atomic>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "softgpu/runtime/device.h"
#include "softgpu/runtime/graph.h"

namespace softgpu {

class Capture;

// A place in a capture: what comes there depends on these nodes.
struct CapturedPoint {
  std::shared_ptr<Capture> capture;
  std::vector<Node*> after;
};

extern std::atomic<int> captures_under_way;

bool captures_now(Stream& stream);
void forbid_unsafe_call_now();
void forbid_asking_now(Stream& stream);
void forbid_waiting_now(Device& device);

// Whether work for the stream becomes a node. Throws if its capture has been invalidated, and if the stream
// is the legacy stream, which would have to wait for one that captures.
inline bool captures(Stream& stream) {
  return captures_under_way.load(std::memory_order_relaxed) != 0 && captures_now(stream);
}

// What a capture of this thread, or one that forbids it to all threads, does not bear, such as cudaMalloc.
// Throws, and invalidates the capture.
inline void forbid_unsafe_call() {
  if (captures_under_way.load(std::memory_order_relaxed) != 0) forbid_unsafe_call_now();
}

// The same for waiting for a stream, or for all of a device, and asking whether they are through: of what is
// captured there is nothing to wait for.
inline void forbid_asking(Stream& stream) {
  if (captures_under_way.load(std::memory_order_relaxed) != 0) forbid_asking_now(stream);
}
inline void forbid_waiting(Device& device) {
  if (captures_under_way.load(std::memory_order_relaxed) != 0) forbid_waiting_now(device);
}

// Only for streams that capture. The node comes behind all of them.
void add_node(const std::vector<Stream*>& streams, cudaGraphNodeType type, std::string_view text,
              WorkMaker make);
inline void add_node(Stream& stream, cudaGraphNodeType type, std::string_view text, WorkMaker make) {
  add_node(std::vector{&stream}, type, text, std::move(make));
}

// Ends what the stream captures, because of a call that can't be part of a graph.
[[noreturn]] void refuse_in_capture(Stream& stream, cudaError_t error, const char* text);

CapturedPoint captured_end(Stream& stream);                        // only for a stream that captures
void wait_in_capture(Stream& stream, const CapturedPoint& point);  // makes the stream part of the capture
[[noreturn]] void refuse_captured_event(const CapturedPoint& point);

// Puts work at the end of the stream, or what makes it into a graph. Returns the point behind it, which
// nobody has to wait for in the latter case.
template <class Make>
Point submit(Stream& stream, cudaGraphNodeType type, Make make) {
  if (!captures(stream)) return stream.device.enqueue(stream, make());
  add_node(stream, type, "", std::move(make));
  return {};
}

}  // namespace softgpu
