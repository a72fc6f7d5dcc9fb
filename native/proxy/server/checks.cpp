// Checks: whether the calls of a minibatch, made again, leave the device's memory as they did before.
#include <algorithm>
#include <cstring>
#include <vector>

#include "proxy/server/images.h"
#include "proxy/server/services.h"
#include "real_calls.h"

namespace jitckpt::proxy {
namespace {

constexpr std::size_t part_bytes = 2048 * wire::block_bytes;  // that are compared at one time

cudaError_t copy(uint64_t to, uint64_t from, std::size_t bytes, cudaMemcpyKind kind) {
  return real::cudaMemcpyAsync(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes, kind,
                               nullptr);
}

template <class T>
T* at(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

// What a byte may be that the minibatch never writes.
struct Unwritten {
  const std::byte* image;  // where the piece's block was then; null: it held nothing
  bool filled;
  std::byte filled_with;

  bool may_be(std::byte now, std::byte then, std::size_t place) const {
    if (image) return now == std::byte{wire::overwritten} && then == image[place];
    return !filled || now == filled_with;
  }
};

wire::Found compared(const std::byte* now, const std::byte* then, const Unwritten& unwritten,
                     std::size_t bytes) {
  if (std::memcmp(now, then, bytes) == 0) return wire::Found::same;
  for (std::size_t i = 0; i < bytes; ++i) {
    if (now[i] != then[i] && !unwritten.may_be(now[i], then[i], i)) return wire::Found::different;
  }
  return wire::Found::unwritten;
}

// What differs becomes what it was: whatever the calls depend on besides, the program goes on with that.
cudaError_t compare(const wire::Piece& piece, std::vector<std::byte>& part, std::byte filled_with) {
  auto* found = at<wire::Found>(piece.found);
  for (uint64_t done = 0; done < piece.bytes; done += part_bytes) {
    const std::size_t bytes = std::min<std::size_t>(part_bytes, piece.bytes - done);
    cudaError_t error =
        copy(reinterpret_cast<uint64_t>(part.data()), piece.address + done, bytes, cudaMemcpyDeviceToHost);
    if (error == cudaSuccess) error = real::cudaStreamSynchronize(nullptr);
    if (error != cudaSuccess) return error;
    const auto* const then = at<std::byte>(piece.copy + done);
    const auto* const image = piece.image == 0 ? nullptr : at<std::byte>(piece.image + done);
    bool differs = false;
    for (std::size_t block = 0; block < bytes; block += wire::block_bytes) {
      const std::size_t length = std::min(wire::block_bytes, bytes - block);
      const Unwritten unwritten{image ? image + block : nullptr, piece.filled != 0, filled_with};
      *found = compared(part.data() + block, then + block, unwritten, length);
      differs |= *found++ != wire::Found::same;
    }
    if (!differs) continue;
    error = copy(piece.address + done, piece.copy + done, bytes, cudaMemcpyHostToDevice);
    if (error == cudaSuccess) error = real::cudaStreamSynchronize(nullptr);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

// By the reader itself, as images are.
int32_t serve_check_memory(Request& request) {
  const auto arguments = request.arguments<wire::check_memory>();
  const auto pieces = entries_after<wire::check_memory, wire::Piece>(request, arguments.pieces);
  ControlBlock& control = request.server.control();
  std::set<int32_t> devices;
  for (const wire::Piece& piece : pieces) devices.insert(piece.device);
  if (const cudaError_t error = come_to_rest(devices, request.server); error != cudaSuccess) return error;
  request.answer<wire::check_memory_answer>().check = control.check_made;
  // Who waits is told of the failure, and asks again.
  if (request.server.has_failed() || control.images == Images::unwanted) return cudaSuccess;
  const bool again = arguments.check <= control.check_made;
  std::vector<std::byte> part(again ? part_bytes : 0);
  for (const wire::Piece& piece : pieces) {
    choose_device(piece.device);
    const cudaError_t error = again ? compare(piece, part, std::byte{control.filled_with.load()})
                                    : copy(piece.copy, piece.address, piece.bytes, cudaMemcpyDeviceToHost);
    if (error != cudaSuccess) return error;
  }
  if (const cudaError_t error = synchronize(devices); error != cudaSuccess) return error;
  // From a freeze on nothing counts that the device does: a copy of it would be put back as if it were right.
  if (!again) request.server.wait_while_frozen();
  if (request.server.has_failed() || control.images == Images::unwanted) return cudaSuccess;
  if (again)
    control.check_compared = arguments.check;
  else
    control.check_made = arguments.check;
  request.answer<wire::check_memory_answer>().check = control.check_made;
  return cudaSuccess;
}

}  // namespace jitckpt::proxy
