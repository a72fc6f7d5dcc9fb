// The real device calls behind ours. The generated real_calls.h has one function for each, in namespace
// jitckpt::real, so that nothing in this library can reach its own entry points by accident.
#pragma once
#include <atomic>
#include <type_traits>

#include "device_api/libraries.h"

namespace jitckpt::real {

// The next definition after ours, or nullptr; says on stderr what is missing, once a call.
void* find(Library library, const char* name) noexcept;

// A function that is looked up at its first call and never again.
template <typename Function>
class Symbol {
 public:
  constexpr Symbol(Library library, const char* name) : library_(library), name_(name) {}

  Function get() noexcept {
    // Relaxed: what the pointer leads to is code, which was there before.
    const Function function = function_.load(std::memory_order_relaxed);
    return function ? function : look_up();
  }

 private:
  [[gnu::noinline]] Function look_up() noexcept {
    if (missing_.load(std::memory_order_relaxed)) return nullptr;
    const auto function = reinterpret_cast<Function>(find(library_, name_));
    if (!function) missing_.store(true, std::memory_order_relaxed);
    function_.store(function, std::memory_order_relaxed);
    return function;
  }

  std::atomic<Function> function_{nullptr};
  std::atomic<bool> missing_{false};
  Library library_;
  const char* name_;
};

// What a call returns whose library is not there.
template <typename Result>
Result missing() noexcept {
  if constexpr (std::is_same_v<Result, cudaError_t>) {
    return cudaErrorSharedObjectSymbolNotFound;
  } else if constexpr (std::is_same_v<Result, CUresult>) {
    return CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND;
  } else if constexpr (std::is_same_v<Result, ncclResult_t>) {
    return ncclSystemError;
  } else if constexpr (std::is_same_v<Result, cublasStatus_t>) {
    return CUBLAS_STATUS_NOT_INITIALIZED;
  } else if constexpr (std::is_same_v<Result, const char*>) {
    return "its library is not loaded";
  } else {
    return Result();
  }
}

}  // namespace jitckpt::real
