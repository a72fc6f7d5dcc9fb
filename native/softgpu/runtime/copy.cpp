// Copies and fills. When a call returns is CUDA's rule: memory that the device can't reach on its own
// (pageable) is read before the call returns, or written before it does; everything else is asynchronous.
#include <cstring>

#include "softgpu/runtime/capture.h"
#include "softgpu/runtime/device.h"
#include "softgpu/runtime/host_memory.h"
#include "softgpu/runtime/stream_functions.h"

namespace softgpu {
namespace {

// Rows of bytes in memory; one row if it is not a 2D copy.
struct Rows {
  char* begin;
  std::size_t pitch;  // from the start of a row to that of the next
};

struct Area {
  std::size_t width, height;  // bytes, rows
  std::size_t span(std::size_t pitch) const { return (height - 1) * pitch + width; }
};

enum class Place { device, pinned, pageable };

// Where the rows lie. Throws CudaFailure if they start in device memory and leave the allocation.
Place place_of(const Rows& rows, const Area& area) {
  const std::size_t bytes = area.span(rows.pitch);
  if (Device* device = device_of(rows.begin)) {
    require(device->memory.holds(rows.begin, bytes), cudaErrorInvalidValue,
            "the bytes are not all in one allocation of device memory");
    return Place::device;
  }
  const auto block = HostMemory::get().find(rows.begin);
  const char* const end = rows.begin + bytes;
  return block && end <= static_cast<char*>(block->begin) + block->bytes ? Place::pinned : Place::pageable;
}

void require_direction(cudaMemcpyKind kind, Place to, Place from) {
  require(kind >= cudaMemcpyHostToHost && kind <= cudaMemcpyDefault, cudaErrorInvalidMemcpyDirection, "");
  if (kind == cudaMemcpyDefault) return;
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  require(to_device == (to == Place::device), cudaErrorInvalidValue,
          to_device ? "the copy's direction says 'to the device', and the pointer is not a device pointer"
                    : "the copy's direction says 'to the host', and the pointer is a device pointer");
  require(from_device == (from == Place::device), cudaErrorInvalidValue,
          from_device ? "the copy's direction says 'from the device', and the pointer is not a device pointer"
                      : "the copy's direction says 'from the host', and the pointer is a device pointer");
}

void copy_rows(Rows to, Rows from, Area area) {
  to.begin = static_cast<char*>(shadow(to.begin));
  from.begin = static_cast<char*>(shadow(from.begin));
  for (std::size_t row = 0; row < area.height; ++row) {
    std::memmove(to.begin + row * to.pitch, from.begin + row * from.pitch, area.width);
  }
}

std::unique_ptr<Work> staged_copy(Rows to, Rows from, Area area) {
  std::unique_ptr<char[]> staging(new char[area.width * area.height]);
  const Rows staged{staging.get(), area.width};
  copy_rows(staged, from, area);
  return make_work([to, staged, area, staging = std::move(staging)] { copy_rows(to, staged, area); });
}

enum class Returns { at_once, finished };

bool has_nothing_before(Stream& stream) { return stream.device.ends_before(stream).empty(); }

void wait_for_all_before(Stream& stream) {
  for (const Point& point : stream.device.ends_before(stream)) wait_on_host(point);
  stream.device.check();
}

void copy(Rows to, Rows from, Area area, cudaMemcpyKind kind, cudaStream_t handle, Returns returns) {
  const auto stream = find_stream(handle);
  if (returns == Returns::finished) forbid_unsafe_call();
  if (area.width == 0 || area.height == 0) return;
  require(to.begin && from.begin, cudaErrorInvalidValue, "a null pointer to copy to or from");
  require(area.height == 1 || (area.width <= to.pitch && area.width <= from.pitch),
          cudaErrorInvalidPitchValue, "a row is longer than the pitch");
  const Place destination = place_of(to, area), source = place_of(from, area);
  require_direction(kind, destination, source);
  const bool to_device = destination == Place::device, from_device = source == Place::device;
  const bool between_hosts = !to_device && !from_device, within_devices = to_device && from_device;
  const bool from_pageable = source == Place::pageable && to_device;

  if (captures(*stream)) {
    if (destination == Place::pageable || source == Place::pageable) {
      refuse_in_capture(*stream, cudaErrorStreamCaptureUnsupported,
                        "a graph copies no pageable memory of the host, only pinned memory");
    }
    add_node(*stream, cudaGraphNodeTypeMemcpy, "",
             [=] { return make_work([=] { copy_rows(to, from, area); }); });
    return;
  }

  // What the host has to wait for it does itself, when its turn has come: no thread to wake, no staging.
  if (between_hosts || destination == Place::pageable || (returns == Returns::finished && !within_devices)) {
    wait_for_all_before(*stream);
    copy_rows(to, from, area);
  } else if (from_pageable && has_nothing_before(*stream)) {
    stream->device.check();
    copy_rows(to, from, area);
  } else {
    stream->device.enqueue(
        *stream, from_pageable ? staged_copy(to, from, area) : make_work([=] { copy_rows(to, from, area); }));
  }
}

void fill(Rows to, int value, Area area, cudaStream_t handle, Returns returns) {
  const auto stream = find_stream(handle);
  if (returns == Returns::finished) forbid_unsafe_call();
  if (area.width == 0 || area.height == 0) return;
  require(area.height == 1 || area.width <= to.pitch, cudaErrorInvalidPitchValue,
          "a row is longer than the pitch");
  const Place place = place_of(to, area);
  require(place != Place::pageable, cudaErrorInvalidValue,
          "the pointer to fill is neither device nor pinned memory");
  const auto done = submit(*stream, cudaGraphNodeTypeMemset, [=] {
    return make_work([=] {
      char* const begin = static_cast<char*>(shadow(to.begin));
      for (std::size_t row = 0; row < area.height; ++row)
        std::memset(begin + row * to.pitch, value, area.width);
    });
  });
  if (place == Place::pinned && returns == Returns::finished) wait_on_host(done);
}

Rows rows(void* begin, std::size_t pitch) { return {static_cast<char*>(begin), pitch}; }
Rows rows(const void* begin, std::size_t pitch) { return rows(const_cast<void*>(begin), pitch); }

cudaError_t copy_call(Rows to, Rows from, Area area, cudaMemcpyKind kind, cudaStream_t stream,
                      Returns returns) {
  return device_call([&](Device&) {
    copy(to, from, area, kind, stream, returns);
    return cudaSuccess;
  });
}

cudaError_t fill_call(Rows to, int value, Area area, cudaStream_t stream, Returns returns) {
  return device_call([&](Device&) {
    fill(to, value, area, stream, returns);
    return cudaSuccess;
  });
}

cudaError_t peer_copy_call(void* to, int to_device, const void* from, int from_device, std::size_t bytes,
                           cudaStream_t stream, Returns returns) {
  return device_call([&](Device&) {
    require(device_of(to) == &find_device(to_device) && device_of(from) == &find_device(from_device),
            cudaErrorInvalidValue, "a pointer does not belong to the device that was named with it");
    copy(rows(to, bytes), rows(from, bytes), {bytes, 1}, cudaMemcpyDeviceToDevice, stream, returns);
    return cudaSuccess;
  });
}

}  // namespace
}  // namespace softgpu

using namespace softgpu;

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return copy_call(rows(to, bytes), rows(from, bytes), {bytes, 1}, kind, stream, Returns::at_once);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return copy_call(rows(to, bytes), rows(from, bytes), {bytes, 1}, kind, cudaStreamLegacy, Returns::finished);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy_call(rows(to, to_pitch), rows(from, from_pitch), {width, height}, kind, stream,
                   Returns::at_once);
}

cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                         size_t height, cudaMemcpyKind kind) {
  return copy_call(rows(to, to_pitch), rows(from, from_pitch), {width, height}, kind, cudaStreamLegacy,
                   Returns::finished);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t bytes,
                                cudaStream_t stream) {
  return peer_copy_call(to, to_device, from, from_device, bytes, stream, Returns::at_once);
}

cudaError_t cudaMemcpyPeer(void* to, int to_device, const void* from, int from_device, size_t bytes) {
  return peer_copy_call(to, to_device, from, from_device, bytes, cudaStreamLegacy, Returns::finished);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return fill_call(rows(to, bytes), value, {bytes, 1}, stream, Returns::at_once);
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return fill_call(rows(to, bytes), value, {bytes, 1}, cudaStreamLegacy, Returns::finished);
}

cudaError_t cudaMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream) {
  return fill_call(rows(to, pitch), value, {width, height}, stream, Returns::at_once);
}

cudaError_t cudaMemset2D(void* to, size_t pitch, int value, size_t width, size_t height) {
  return fill_call(rows(to, pitch), value, {width, height}, cudaStreamLegacy, Returns::finished);
}
