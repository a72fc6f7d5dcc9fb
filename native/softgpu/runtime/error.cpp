#include "softgpu/runtime/error.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <string_view>
#include <utility>

namespace softgpu {
namespace {

struct KnownError {
  int number;
  const char *name, *text;
};

// As libcudart 13.0 names them; sorted by number.
constexpr KnownError known_errors[] = {
#include "softgpu/runtime/known_errors.inc"
};

const KnownError* find_known(cudaError_t error) {
  const auto* found =
      std::lower_bound(std::begin(known_errors), std::end(known_errors), static_cast<int>(error),
                       [](const KnownError& known, int number) { return known.number < number; });
  return found != std::end(known_errors) && found->number == static_cast<int>(error) ? found : nullptr;
}

// A thread keeps the text of its newest failure beyond cudaGetLastError: callers clear the error first and
// ask for its text then.
struct ThreadErrors {
  cudaError_t last = cudaSuccess;
  cudaError_t explained = cudaSuccess;
  char explanation[1024] = "";  // no std::string: it would be destroyed before the last callers at exit
};

ThreadErrors& thread_errors() {
  thread_local ThreadErrors errors;
  return errors;
}

const char* known_text(cudaError_t error) {
  const KnownError* known = find_known(error);
  return known ? known->text : "unrecognized error code";
}

}  // namespace

cudaError_t remember(const CudaFailure& failure) noexcept {
  ThreadErrors& errors = thread_errors();
  errors.last = failure.error;
  if (!failure.text.empty()) {
    errors.explained = failure.error;
    std::snprintf(errors.explanation, sizeof errors.explanation, "%s: %s", known_text(failure.error),
                  failure.text.c_str());
  } else if (errors.explained == failure.error) {
    errors.explained = cudaSuccess;
  }
  return failure.error;
}

void require(bool condition, cudaError_t error, const char* text) {
  if (!condition) throw CudaFailure{error, text};
}

void require_place(const void* place) {
  require(place != nullptr, cudaErrorInvalidValue, "no place to put the result");
}

}  // namespace softgpu

using namespace softgpu;

cudaError_t cudaGetLastError() { return std::exchange(thread_errors().last, cudaSuccess); }

cudaError_t cudaPeekAtLastError() { return thread_errors().last; }

const char* cudaGetErrorName(cudaError_t error) {
  const KnownError* known = find_known(error);
  return known ? known->name : "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  const ThreadErrors& errors = thread_errors();
  return error != cudaSuccess && error == errors.explained ? errors.explanation : known_text(error);
}

namespace {

// What to do without the function, for those that programs come upon.
const char* advice(std::string_view function) {
  const auto named = [function](std::string_view part) { return function.find(part) != function.npos; };
  if (named("Graph")) return ": a graph is made by capturing a stream (torch.cuda.graph)";
  if (named("MemPool") || named("MallocAsync") || named("FreeAsync") || named("FromPool")) {
    return " and no memory pools: use torch's own allocator (no backend:cudaMallocAsync), or cudaMalloc";
  }
  return "";
}

}  // namespace

// The result of every function of CUDA's that softgpu does not have (refused_calls.cmake).
extern "C" int softgpu_refuse(const char* function) {
  return call([function]() -> cudaError_t {
    throw CudaFailure{cudaErrorNotSupported, std::string("softgpu has no ") + function + advice(function)};
  });
}
