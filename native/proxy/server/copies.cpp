// Copies, and the pinned memory that both processes map.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "proxy/server/device_memory.h"
#include "proxy/server/failure.h"
#include "proxy/server/server.h"
#include "proxy/server/services.h"
#include "proxy/transport/digest.h"
#include "real_calls.h"

namespace jitckpt::proxy {
namespace {

void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// Whether that call was over before.
bool is_over(Server& server, uint32_t flag) {
  if (flag == no_copy_flag) return false;
  if (flag >= copy_flag_count) throw CallFailure(cudaErrorInvalidValue, "there is no such flag of a copy");
  return server.control().copied[flag] != 0;
}

// The device itself sets the flag, behind the copy.
cudaError_t set_when_over(ControlBlock& control, uint32_t flag, cudaStream_t stream) {
  if (flag >= copy_flag_count)
    throw CallFailure(cudaErrorInvalidValue, "a copy has no flag that says when it is over");
  static const cudaError_t known =
      real::cudaHostRegister(control.copied, sizeof control.copied, cudaHostRegisterPortable);
  return known == cudaSuccess ? real::cudaMemsetAsync(&control.copied[flag], 1, 1, stream) : known;
}

// What the call has written stays, but something has to be in its place: a stream that waits for the legacy
// stream, or that one for it, does so with a call, and who then waits for the stream has waited for both.
cudaError_t leave_out(Server& server, uint32_t flag, cudaStream_t stream) {
  return set_when_over(server.control(), flag, stream);  // once more
}

bool compares_answers(Server& server) {
  return server.control().compares_answers != 0 && server.replays() && !server.steps.skips();
}

// Whether a copy would give the program again what it has got from it.
cudaError_t compare_when_over(Server& server, const wire::copy& copy, cudaStream_t stream) {
  struct Compared {
    Server& server;
    const std::byte* kept;
    std::size_t bytes;
  };
  auto compared = std::make_unique<Compared>(
      Compared{server, static_cast<const std::byte*>(pointer(copy.kept)), copy.compared_bytes});
  const auto compare = [](void* argument) {
    const std::unique_ptr<Compared> owned(static_cast<Compared*>(argument));
    const bool same = std::memcmp(owned->kept, owned->kept + owned->bytes, owned->bytes) == 0;
    if (!same && owned->server.counts()) ++owned->server.control().different_answers;
  };
  const cudaError_t result = real::cudaLaunchHostFunc(stream, compare, compared.get());
  if (result == cudaSuccess) compared.release();
  return result;
}

}  // namespace

int32_t serve_allocate(Request& request) {
  const auto arguments = request.arguments<wire::allocate>();
  auto& answer = request.answer<wire::allocate_answer>();
  int32_t device = 0;
  if (const cudaError_t chosen = real::cudaGetDevice(&device); chosen != cudaSuccess) return chosen;
  if (request.server.take_kept(arguments.address, {arguments.bytes, device})) {
    answer.address = arguments.address;
    return cudaSuccess;
  }
  void* memory = nullptr;
  const cudaError_t result = allocate_device_memory(&memory, arguments.address, arguments.bytes, device);
  if (arguments.address != 0 && (result != cudaSuccess || memory != pointer(arguments.address)))
    throw Different("the device does not give memory at the addresses of before");
  if (result != cudaSuccess) return result;
  answer.address = reinterpret_cast<uint64_t>(memory);
  request.server.memory.add(answer.address, {arguments.bytes, device});
  return cudaSuccess;
}

int32_t serve_copy(Request& request) {
  const auto arguments = request.arguments<wire::copy>();
  Server& server = request.server;
  const bool was_over = is_over(server, arguments.flag);
  const uint64_t compared = arguments.compared_bytes;
  const cudaStream_t stream = server.streams.find(arguments.stream);
  if (was_over && (compared == 0 || !compares_answers(server)))
    return leave_out(server, arguments.flag, stream);
  if (compared != 0) server.locked_pages.lock(arguments.room, server.control().segment_bytes);
  const auto keep = [&](uint64_t to) {
    return real::cudaMemcpyAsync(pointer(to), pointer(arguments.from), compared, cudaMemcpyDeviceToHost,
                                 stream);
  };
  if (was_over) {
    const cudaError_t kept = keep(arguments.kept + compared);
    return kept == cudaSuccess ? compare_when_over(server, arguments, stream) : kept;
  }
  cudaError_t result = real::cudaMemcpyAsync(pointer(arguments.to), pointer(arguments.from), arguments.bytes,
                                             static_cast<cudaMemcpyKind>(arguments.kind), stream);
  if (result == cudaSuccess && compared != 0) result = keep(arguments.kept);
  return result == cudaSuccess && arguments.flag != no_copy_flag
             ? set_when_over(server.control(), arguments.flag, stream)
             : result;
}

// What has come to the device is what was read, whoever writes to the pinned memory. The flag comes last: who
// knows that the copy is over, and so may write there, does so behind the flag.
int32_t serve_copy_from_pinned(Request& request) {
  const auto arguments = request.arguments<wire::copy_from_pinned>();
  Server& server = request.server;
  const cudaStream_t stream = server.streams.find(arguments.stream);
  const bool was_read = is_over(server, arguments.flag);
  // Else the copies wait for what is on the stream; no less right.
  server.locked_pages.lock(arguments.room, server.control().segment_bytes);
  cudaError_t result =
      real::cudaMemcpyAsync(pointer(arguments.to), pointer(was_read ? arguments.kept : arguments.from),
                            arguments.bytes, cudaMemcpyHostToDevice, stream);
  if (result != cudaSuccess || was_read) return result;
  result = real::cudaMemcpyAsync(pointer(arguments.kept), pointer(arguments.to), arguments.bytes,
                                 cudaMemcpyDeviceToHost, stream);
  return result == cudaSuccess ? set_when_over(server.control(), arguments.flag, stream) : result;
}

int32_t serve_copy_from_host(Request& request) {
  const auto arguments = request.arguments<wire::copy_from_host>();
  const auto content = request.rest<wire::copy_from_host>();
  if (content.size() < arguments.bytes)
    throw CallFailure(cudaErrorInvalidValue, "a copy's record is shorter than it says");
  // Pageable memory, which CUDA has read when the call returns: the log may be used again.
  return real::cudaMemcpyAsync(pointer(arguments.to), content.data(), arguments.bytes, cudaMemcpyHostToDevice,
                               request.server.streams.find(arguments.stream));
}

int32_t serve_copy_to_host(Request& request) {
  const auto arguments = request.arguments<wire::copy_to_host>();
  if (arguments.bytes > staging_bytes) throw CallFailure(cudaErrorInvalidValue, "a copy's piece is too long");
  const cudaStream_t stream = request.server.streams.find(arguments.stream);
  const cudaError_t result = real::cudaMemcpyAsync(request.slot.staging, pointer(arguments.from),
                                                   arguments.bytes, cudaMemcpyDeviceToHost, stream);
  if (result != cudaSuccess) return result;
  const cudaError_t over = real::cudaStreamSynchronize(stream);
  if (over != cudaSuccess || arguments.digest == 0 || !compares_answers(request.server)) return over;
  const bool same = digest_of({request.slot.staging, arguments.bytes}) == arguments.digest;
  if (!same && request.server.counts()) ++request.server.control().different_answers;
  return over;
}

int32_t serve_fill(Request& request) {
  const auto arguments = request.arguments<wire::fill>();
  const cudaStream_t stream = request.server.streams.find(arguments.stream);
  if (is_over(request.server, arguments.flag)) return leave_out(request.server, arguments.flag, stream);
  const cudaError_t result =
      arguments.height == 1
          ? real::cudaMemsetAsync(pointer(arguments.to), arguments.value, arguments.width, stream)
          : real::cudaMemset2DAsync(pointer(arguments.to), arguments.pitch, arguments.value, arguments.width,
                                    arguments.height, stream);
  return result == cudaSuccess && arguments.flag != no_copy_flag
             ? set_when_over(request.server.control(), arguments.flag, stream)
             : result;
}

int32_t serve_register_host(Request& request) {
  const auto arguments = request.arguments<wire::register_host>();
  // The flags that both calls have are of the same value; write-combining is nothing to memory that exists.
  static_assert(cudaHostAllocPortable == cudaHostRegisterPortable &&
                cudaHostAllocMapped == cudaHostRegisterMapped);
  const unsigned flags = arguments.flags & (cudaHostRegisterPortable | cudaHostRegisterMapped);
  request.server.locked_pages.give_way(arguments.address, arguments.bytes);
  const cudaError_t result = real::cudaHostRegister(pointer(arguments.address), arguments.bytes, flags);
  if (result == cudaSuccess) request.server.host_memory.add(arguments.address, {arguments.bytes, 0});
  return result;
}

int32_t serve_share_host(Request& request) {
  const auto arguments = request.arguments<wire::share_host>();
  const std::string path =
      "/proc/" + std::to_string(arguments.process) + "/fd/" + std::to_string(arguments.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0)
    throw CallFailure(cudaErrorInvalidValue,
                      "the program's file can't be opened: " + std::string(strerror(errno)));
  void* const memory = mmap(pointer(arguments.address), arguments.bytes, PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_FIXED, file, static_cast<off_t>(arguments.offset));
  const int error = errno;
  close(file);
  if (memory == MAP_FAILED)
    throw CallFailure(cudaErrorMemoryAllocation,
                      "the program's file can't be mapped: " + std::string(strerror(error)));
  const cudaError_t result = real::cudaHostRegister(memory, arguments.bytes, cudaHostRegisterPortable);
  if (result == cudaSuccess) request.server.host_memory.add(arguments.address, {arguments.bytes, 0});
  return result;
}

int32_t serve_write_word(Request& request) {
  struct Word {
    Server& server;
    uint64_t* where;
    uint64_t value;
  };
  const auto arguments = request.arguments<wire::write_word>();
  auto word = std::make_unique<Word>(
      Word{request.server, static_cast<uint64_t*>(pointer(arguments.address)), arguments.value});
  const auto write = [](void* argument) {
    const std::unique_ptr<Word> owned(static_cast<Word*>(argument));
    const uint64_t value = owned->server.counts() ? owned->value : 0;
    __atomic_store_n(owned->where, value, __ATOMIC_RELEASE);
  };
  const cudaError_t result =
      real::cudaLaunchHostFunc(request.server.streams.find(arguments.stream), write, word.get());
  if (result == cudaSuccess) word.release();
  return result;
}

int32_t serve_unregister_host(Request& request) {
  const uint64_t address = request.arguments<wire::unregister_host>().address;
  const cudaError_t result = real::cudaHostUnregister(pointer(address));
  if (result == cudaSuccess) request.server.host_memory.remove(address);
  return result;
}

}  // namespace jitckpt::proxy
