// Copies between the program's memory and the device's, and fills. What lies in memory that the server does
// not have (pageable) travels with the call, in pieces. docs/how-it-works/proxy.md has what becomes of pinned
// memory in a replay.
#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>

#include "proxy/client/capture.h"
#include "proxy/client/connection.h"
#include "proxy/client/requests.h"
#include "proxy/client/thread.h"
#include "proxy/transport/digest.h"
#include "proxy_by_hand.h"

using namespace jitckpt::proxy;
using namespace jitckpt::proxy::client;

namespace {

// Pieces of such a length are copied by the server while the next is written.
constexpr std::size_t piece_bytes = 64 * 1024;
static_assert(piece_bytes <= staging_bytes);
// Of what a copy to pinned memory has given the program: losses, norms, counts.
constexpr uint64_t most_compared = 1024;

struct Direction {
  bool to_device, from_device;

  cudaMemcpyKind kind() const {
    if (!to_device) return from_device ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost;
    return from_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice;
  }
};

bool is_pinned(Connection& connection, const void* begin, std::size_t bytes) {
  return connection.pinned().holds(begin) &&
         connection.pinned().holds(static_cast<const char*>(begin) + bytes - 1);
}

// Whether the device has memory there; nothing after a failure.
std::optional<bool> is_device(const void* pointer) {
  cudaPointerAttributes attributes;
  if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) return std::nullopt;
  return attributes.type == cudaMemoryTypeDevice;
}

std::optional<Direction> direction(cudaMemcpyKind kind, const void* to, const void* from) {
  switch (kind) {
    case cudaMemcpyHostToHost:
      return Direction{false, false};
    case cudaMemcpyHostToDevice:
      return Direction{true, false};
    case cudaMemcpyDeviceToHost:
      return Direction{false, true};
    case cudaMemcpyDeviceToDevice:
      return Direction{true, true};
    case cudaMemcpyDefault: {
      const auto to_device = is_device(to), from_device = is_device(from);
      if (!to_device || !from_device) return std::nullopt;
      return Direction{*to_device, *from_device};
    }
    default:
      fail(Library::cudart, cudaErrorInvalidMemcpyDirection, "");
      return std::nullopt;
  }
}

cudaError_t copy_from_host(char* to, const char* from, std::size_t bytes, cudaStream_t stream) {
  cudaError_t result = cudaSuccess;
  for (std::size_t done = 0; done < bytes && result == cudaSuccess; done += piece_bytes) {
    const std::size_t piece = std::min(piece_bytes, bytes - done);
    const wire::copy_from_host arguments{reinterpret_cast<uint64_t>(to + done), piece, number_of(stream)};
    result = tell<cudaError_t>(Call::copy_from_host, arguments, std::as_bytes(std::span(from + done, piece)));
  }
  return result;
}

cudaError_t copy_to_host(char* to, const char* from, std::size_t bytes, cudaStream_t stream) {
  for (std::size_t done = 0; done < bytes; done += staging_bytes) {
    const std::size_t piece = std::min(staging_bytes, bytes - done);
    wire::copy_to_host arguments{0, reinterpret_cast<uint64_t>(from + done), piece, number_of(stream)};
    const auto result = ask<cudaError_t>(Call::copy_to_host, arguments);
    if (result != cudaSuccess) return result;
    arguments.digest = digest_of({staging_memory(), piece});
    amend_newest(bytes_of(arguments.digest));
    std::memcpy(to + done, staging_memory(), piece);
  }
  return cudaSuccess;
}

// What no replay may do again over what the program has put there since: the device notes when it is over.
// Gives the flag for that to `call`, which tells the server; without one nobody knows whether it is over but
// the thread that waits for it.
cudaError_t with_flag(Connection& connection, const std::function<cudaError_t(uint32_t)>& call,
                      const std::function<cudaError_t()>& without) {
  CopyFlags& flags = connection.copy_flags();
  const auto flag = flags.take();
  if (!flag) return without();
  const auto result = call(*flag);
  flags.give(*flag, result == cudaSuccess ? this_thread().newest.sequence : 0);
  return result;
}

cudaError_t copy_to_pinned(Connection& connection, wire::copy arguments) {
  return with_flag(
      connection,
      [&](uint32_t flag) {
        arguments.flag = flag;
        // Without room for what is compared it is not compared.
        const auto place = connection.pinned_reads().take_room(2 * std::min(arguments.bytes, most_compared));
        if (place) {
          arguments.kept = reinterpret_cast<uint64_t>(place->kept);
          arguments.room = reinterpret_cast<uint64_t>(place->room);
          arguments.compared_bytes = place->bytes / 2;
        }
        const auto result = tell<cudaError_t>(Call::copy, arguments);
        if (place) connection.pinned_reads().give_room(*place, this_thread().newest.sequence);
        return result;
      },
      [&] {
        return copy_to_host(reinterpret_cast<char*>(arguments.to),
                            reinterpret_cast<const char*>(arguments.from), arguments.bytes,
                            reinterpret_cast<cudaStream_t>(arguments.stream));
      });
}

// Once all before it is over, what it reads is what lies there now.
cudaError_t copy_once_its_turn_has_come(char* to, const char* from, std::size_t bytes, cudaStream_t stream) {
  const cudaError_t result = cudaStreamSynchronize(stream);
  return result == cudaSuccess ? copy_from_host(to, from, bytes, stream) : result;
}

cudaError_t copy_from_pinned(Connection& connection, char* to, const char* from, std::size_t bytes,
                             cudaStream_t stream) {
  // A table of addresses lies there when the call is made, as a rule: as one that travels with its call.
  if (connection.state_is_still())
    connection.gives(Call::copy_from_host, {}, std::as_bytes(std::span(from, bytes)));
  PinnedReads& reads = connection.pinned_reads();
  cudaError_t result = cudaSuccess;
  for (std::size_t done = 0; done < bytes && result == cudaSuccess;) {
    const auto place = reads.take(bytes - done);
    if (!place) return copy_once_its_turn_has_come(to + done, from + done, bytes - done, stream);
    const wire::copy_from_pinned arguments{reinterpret_cast<uint64_t>(to + done),
                                           reinterpret_cast<uint64_t>(from + done),
                                           place->bytes,
                                           number_of(stream),
                                           reinterpret_cast<uint64_t>(place->kept),
                                           reinterpret_cast<uint64_t>(place->room),
                                           place->flag};
    result = tell<cudaError_t>(Call::copy_from_pinned, arguments);
    reads.give(*place, from + done, result == cudaSuccess ? this_thread().newest.sequence : 0);
    done += place->bytes;
  }
  return result;
}

enum class Returns { at_once, finished };

cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream,
                 Returns returns) {
  int32_t failure = 0;
  Connection* const connection = Connection::get(Library::cudart, failure);
  if (!connection) return cudaError_t(failure);
  if (bytes == 0) return cudaSuccess;
  if (!to || !from)
    return cudaError_t(fail(Library::cudart, cudaErrorInvalidValue, "a null pointer to copy to or from"));
  if (returns == Returns::finished && forbidden_while_capturing() != cudaSuccess) return newest_error();
  const auto where = direction(kind, to, from);
  if (!where) return newest_error();
  if (captures(stream)) {
    const bool pageable = (!where->from_device && !is_pinned(*connection, from, bytes)) ||
                          (!where->to_device && !is_pinned(*connection, to, bytes));
    if (pageable) {
      return cudaError_t(
          refuse_in_capture(Library::cudart, stream, cudaErrorStreamCaptureUnsupported,
                            "a graph copies no pageable memory of the host, only pinned memory"));
    }
    return cudaError_t(capture(Library::cudart, stream, cudaGraphNodeTypeMemcpy, [=](cudaStream_t other) {
      return copy(to, from, bytes, kind, other, Returns::at_once);
    }));
  }
  if (!where->to_device && !where->from_device) {
    const cudaError_t result = cudaStreamSynchronize(stream);
    if (result == cudaSuccess) std::memmove(to, from, bytes);
    return result;
  }
  if (where->to_device && connection->state_is_still())
    connection->writes(reinterpret_cast<uint64_t>(to), bytes);
  const bool keeps = connection->writer().keeps();
  char* const begin = static_cast<char*>(to);
  const char* const source = static_cast<const char*>(from);
  if (!where->from_device && !is_pinned(*connection, from, bytes))
    return copy_from_host(begin, source, bytes, stream);
  if (!where->from_device && keeps) {
    if (returns == Returns::at_once) return copy_from_pinned(*connection, begin, source, bytes, stream);
    const cudaError_t result = copy_once_its_turn_has_come(begin, source, bytes, stream);
    return result == cudaSuccess ? cudaStreamSynchronize(stream) : result;
  }
  if (!where->to_device && !is_pinned(*connection, to, bytes))
    return copy_to_host(begin, source, bytes, stream);
  const wire::copy arguments{reinterpret_cast<uint64_t>(to),
                             reinterpret_cast<uint64_t>(from),
                             bytes,
                             number_of(stream),
                             where->kind(),
                             no_copy_flag,
                             0,
                             0,
                             0};
  const auto result = keeps && !where->to_device ? copy_to_pinned(*connection, arguments)
                                                 : tell<cudaError_t>(Call::copy, arguments);
  const bool within_device = where->to_device && where->from_device;
  if (result != cudaSuccess || returns == Returns::at_once || within_device) return result;
  return cudaStreamSynchronize(stream);
}

// Of pinned memory: once its turn has come, the host does as well.
cudaError_t fill_by_host(const wire::fill& area) {
  const cudaError_t result = cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(area.stream));
  if (result != cudaSuccess) return result;
  for (uint64_t row = 0; row < area.height; ++row)
    std::memset(reinterpret_cast<char*>(area.to) + row * area.pitch, area.value, area.width);
  return cudaSuccess;
}

cudaError_t fill(void* to, std::size_t pitch, int value, std::size_t width, std::size_t height,
                 cudaStream_t stream) {
  int32_t failure = 0;
  Connection* const connection = Connection::get(Library::cudart, failure);
  if (!connection) return cudaError_t(failure);
  if (width == 0 || height == 0) return cudaSuccess;
  if (captures(stream)) {
    return cudaError_t(capture(Library::cudart, stream, cudaGraphNodeTypeMemset, [=](cudaStream_t other) {
      return fill(to, pitch, value, width, height, other);
    }));
  }
  wire::fill arguments{
      reinterpret_cast<uint64_t>(to), pitch, width, height, number_of(stream), value, no_copy_flag};
  const std::size_t bytes = (height - 1) * pitch + width;
  if (connection->state_is_still()) connection->writes(arguments.to, bytes);
  const auto tell_it = [&](uint32_t flag) {
    arguments.flag = flag;
    return tell<cudaError_t>(Call::fill, arguments);
  };
  if (!is_pinned(*connection, to, bytes) || !connection->writer().keeps()) return tell_it(no_copy_flag);
  return with_flag(*connection, tell_it, [&] { return fill_by_host(arguments); });
}

}  // namespace

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return copy(to, from, bytes, kind, stream, Returns::at_once);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return copy(to, from, bytes, kind, cudaStreamLegacy, Returns::finished);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return fill(to, bytes, value, bytes, 1, stream);
}

cudaError_t cudaMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream) {
  return fill(to, pitch, value, width, height, stream);
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  if (forbidden_while_capturing() != cudaSuccess) return newest_error();
  const cudaError_t result = cudaMemsetAsync(to, value, bytes, cudaStreamLegacy);
  int32_t failure = 0;
  Connection* const connection = Connection::get(Library::cudart, failure);
  if (result != cudaSuccess || bytes == 0 || !is_pinned(*connection, to, bytes)) return result;
  return cudaStreamSynchronize(cudaStreamLegacy);
}
