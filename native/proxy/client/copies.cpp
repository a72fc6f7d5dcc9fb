// Copies between the program's memory and the device's. What lies in memory that the server does not have
// (pageable) travels with the call, in pieces.
#include <algorithm>
#include <cstring>
#include <optional>

#include "connection.h"
#include "proxy_by_hand.h"
#include "requests.h"
#include "thread.h"

using namespace jitckpt::proxy;
using namespace jitckpt::proxy::client;

namespace {

// Pieces of such a length are copied by the server while the next is written.
constexpr std::size_t piece_bytes = 64 * 1024;
static_assert(piece_bytes <= staging_bytes);

struct Direction {
  bool to_device, from_device;
};

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
    const wire::copy_to_host arguments{reinterpret_cast<uint64_t>(from + done), piece, number_of(stream)};
    const auto result = ask<cudaError_t>(Call::copy_to_host, arguments);
    if (result != cudaSuccess) return result;
    std::memcpy(to + done, staging_memory(), piece);
  }
  return cudaSuccess;
}

// A replay makes it again unless it was over: the program may have put something else there since.
cudaError_t copy_to_pinned(Connection& connection, wire::copy arguments) {
  CopyFlags& flags = connection.copy_flags();
  const auto flag = flags.take(connection.writer().kept_from());
  if (!flag) {  // nobody knows then whether it is over but the thread that waits for it
    return copy_to_host(reinterpret_cast<char*>(arguments.to), reinterpret_cast<const char*>(arguments.from),
                        arguments.bytes, reinterpret_cast<cudaStream_t>(arguments.stream));
  }
  arguments.flag = *flag;
  const auto result = tell<cudaError_t>(Call::copy, arguments);
  flags.give(*flag, result == cudaSuccess ? this_thread().newest.sequence : 0);
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
  const auto where = direction(kind, to, from);
  if (!where) return newest_error();
  if (!where->to_device && !where->from_device) {
    const cudaError_t result = cudaStreamSynchronize(stream);
    if (result == cudaSuccess) std::memmove(to, from, bytes);
    return result;
  }
  if (where->to_device && connection->state_is_still())
    connection->writes(reinterpret_cast<uint64_t>(to), bytes);
  const auto pinned = [connection](const void* begin, std::size_t length) {
    return connection->pinned().holds(begin) &&
           connection->pinned().holds(static_cast<const char*>(begin) + length - 1);
  };
  // What may be copied again travels with the call: the program may write something else there.
  if (!where->from_device && (!pinned(from, bytes) || connection->writer().keeps()))
    return copy_from_host(static_cast<char*>(to), static_cast<const char*>(from), bytes, stream);
  if (!where->to_device && !pinned(to, bytes))
    return copy_to_host(static_cast<char*>(to), static_cast<const char*>(from), bytes, stream);
  const wire::copy arguments{reinterpret_cast<uint64_t>(to),
                             reinterpret_cast<uint64_t>(from),
                             bytes,
                             number_of(stream),
                             kind,
                             no_copy_flag};
  const auto result =
      where->to_device ? tell<cudaError_t>(Call::copy, arguments) : copy_to_pinned(*connection, arguments);
  const bool within_device = where->to_device && where->from_device;
  if (result != cudaSuccess || returns == Returns::at_once || within_device) return result;
  return cudaStreamSynchronize(stream);
}

}  // namespace

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return copy(to, from, bytes, kind, stream, Returns::at_once);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return copy(to, from, bytes, kind, cudaStreamLegacy, Returns::finished);
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, cudaStreamLegacy);
}
