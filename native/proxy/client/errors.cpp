#include "proxy/client/errors.h"

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "proxy/client/connection.h"
#include "proxy/client/requests.h"
#include "proxy/transport/answer.h"
#include "proxy_by_hand.h"

namespace jitckpt::proxy::client {
namespace {

// No std::string: threads may call while their other thread-local objects are destroyed already.
struct ThreadErrors {
  cudaError_t last = cudaSuccess;
  int32_t explained[library_count] = {};
  char text[library_count][1200] = {};
};

ThreadErrors& thread_errors() {
  thread_local ThreadErrors errors;
  return errors;
}

// The libraries' own words, asked for once.
struct KnownError {
  std::string name, text;
};

const KnownError& known_error(Library library, int32_t error) {
  static auto* const mutex = new std::mutex;
  static auto* const known = new std::map<std::pair<Library, int32_t>, KnownError>;
  {
    std::lock_guard lock(*mutex);
    if (const auto found = known->find({library, error}); found != known->end()) return found->second;
  }
  static const auto* const unknown = new KnownError{"unrecognized error code", "unrecognized error code"};
  const wire::error_text arguments{error, library == Library::nccl};
  wire::error_text_answer answer;
  if (!ask_quietly(Call::error_text, arguments, answer)) return *unknown;
  std::lock_guard lock(*mutex);
  return known->try_emplace({library, error}, KnownError{answer.name, answer.text}).first->second;
}

}  // namespace

int32_t fail(Library library, int32_t result, std::string_view text) {
  ThreadErrors& errors = thread_errors();
  const auto index = static_cast<std::size_t>(library);
  if (library == Library::cudart) errors.last = static_cast<cudaError_t>(result);
  errors.explained[index] = text.empty() ? 0 : result;
  put_text(errors.text[index], sizeof errors.text[index], text);
  return result;
}

cudaError_t newest_error() { return thread_errors().last; }

// Once in a process: the program may only ask whether something is there.
void name_refused(const char* function, const std::string& text) {
  static auto* const mutex = new std::mutex;
  static auto* const named = new std::set<std::string>;
  std::lock_guard lock(*mutex);
  if (named->insert(function).second) std::fprintf(stderr, "jitckpt: %s.\n", text.c_str());
}

int32_t refuse_by_name(Library library, const char* function) {
  const std::string_view name = function;
  const bool graphs = name.find("Graph") != name.npos || name.find("Capture") != name.npos;
  const bool managed = name.find("Managed") != name.npos || name.find("Prefetch") != name.npos;
  const bool pools = name.find("MemPool") != name.npos || name.find("Async") != name.npos;
  const char* const advice = graphs    ? ": a graph is made by capturing a stream (torch.cuda.graph)"
                             : managed ? " and no managed memory: use device memory and copies"
                             : pools   ? ": use torch's own allocator and plain copies"
                                       : ": train without the proxy, or without what calls it";
  const std::string text = "the device proxy carries no " + std::string(function) + advice;
  name_refused(function, text);
  return fail(library,
              in_words_of(library, cudaErrorNotSupported, ncclInvalidUsage, CUBLAS_STATUS_NOT_SUPPORTED),
              text);
}

}  // namespace jitckpt::proxy::client

using namespace jitckpt::proxy;
using namespace jitckpt::proxy::client;

cudaError_t cudaGetLastError() {
  ThreadErrors& errors = thread_errors();
  const cudaError_t last = errors.last;
  errors.last = cudaSuccess;
  return last;
}

cudaError_t cudaPeekAtLastError() { return thread_errors().last; }

const char* cudaGetErrorName(cudaError_t error) { return known_error(Library::cudart, error).name.c_str(); }

const char* cudaGetErrorString(cudaError_t error) {
  const ThreadErrors& errors = thread_errors();
  if (error != cudaSuccess && errors.explained[0] == error) return errors.text[0];
  return known_error(Library::cudart, error).text.c_str();
}

const char* ncclGetErrorString(ncclResult_t result) {
  return known_error(Library::nccl, result).text.c_str();
}

const char* ncclGetLastError(ncclComm_t) { return thread_errors().text[1]; }
