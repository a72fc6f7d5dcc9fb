// cudaHostAlloc and its like.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proxy/client/connection.h"
#include "proxy/client/jitckpt_proxy.h"
#include "proxy/client/requests.h"
#include "proxy_by_hand.h"

using namespace jitckpt::proxy;
using namespace jitckpt::proxy::client;

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  if (!pointer) return no_place<cudaError_t>();
  int32_t failure = 0;
  Connection* const connection = Connection::get(Library::cudart, failure);
  if (!connection) return cudaError_t(failure);
  constexpr unsigned known = cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
  if ((flags & ~known) != 0)
    return cudaError_t(fail(Library::cudart, cudaErrorInvalidValue, "unknown flags for pinned memory"));
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  void* const memory = connection->pinned().allocate(bytes);
  if (!memory) {
    return cudaError_t(fail(Library::cudart, cudaErrorMemoryAllocation,
                            "the device proxy has no more pinned memory: raise JITCKPT_PROXY_PINNED_BYTES"));
  }
  const wire::register_host arguments{reinterpret_cast<uint64_t>(memory), connection->pinned().length(memory),
                                      flags};
  const auto result = ask<cudaError_t>(Call::register_host, arguments);
  if (result == cudaSuccess) {
    note_object(arguments.address, Call::register_host, bytes_of(arguments));
    *pointer = memory;
  } else {
    connection->pinned().release(memory);
  }
  return result;
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return cudaHostAlloc(pointer, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void* pointer) {
  int32_t failure = 0;
  Connection* const connection = Connection::get(Library::cudart, failure);
  if (!connection) return cudaError_t(failure);
  if (!pointer) return cudaSuccess;
  if (connection->pinned().length(pointer) == 0) {
    return cudaError_t(
        fail(Library::cudart, cudaErrorInvalidValue, "the pointer was not allocated as pinned host memory"));
  }
  const auto result =
      ask<cudaError_t>(Call::unregister_host, wire::unregister_host{reinterpret_cast<uint64_t>(pointer)});
  if (result != cudaSuccess) return result;
  note_end(reinterpret_cast<uint64_t>(pointer));
  connection->release_pinned(pointer);
  return result;
}

// In the place of pinned memory of our own, so that it counts as such, and lies where the server has it free.
int jitckpt_proxy_share(int file, uint64_t offset, uint64_t bytes, void** pointer) {
  int32_t failure = 0;
  Connection* const connection = Connection::get(Library::cudart, failure);
  if (!connection) return failure;
  *pointer = nullptr;
  void* const memory = connection->pinned().allocate(bytes);
  // The server opens it by our number, and so does each that takes its place.
  const int kept = memory ? fcntl(file, F_DUPFD_CLOEXEC, 0) : -1;
  if (kept < 0 || mmap(memory, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, kept,
                       static_cast<off_t>(offset)) == MAP_FAILED) {
    return fail(Library::cudart, cudaErrorMemoryAllocation, "the file can't be mapped as pinned memory");
  }
  const wire::share_host arguments{reinterpret_cast<uint64_t>(memory), bytes, offset, getpid(), kept};
  const auto result = ask<cudaError_t>(Call::share_host, arguments);
  if (result != cudaSuccess) return result;
  note_object(arguments.address, Call::share_host, bytes_of(arguments));
  *pointer = memory;
  return cudaSuccess;
}

int jitckpt_proxy_write_word(uint64_t* where, uint64_t value, void* stream) {
  const wire::write_word arguments{reinterpret_cast<uint64_t>(where), value,
                                   number_of(static_cast<cudaStream_t>(stream))};
  return tell<cudaError_t>(Call::write_word, arguments);
}
