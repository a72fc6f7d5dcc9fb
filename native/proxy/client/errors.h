// What a thread of the program is told of its failures, as CUDA's and NCCL's own libraries keep it.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "proxy/failures.h"
#include "proxy/wire.h"

namespace jitckpt::proxy::client {

template <class Result>
constexpr Library library_of = Library::cudart;
template <>
inline constexpr Library library_of<ncclResult_t> = Library::nccl;
template <>
inline constexpr Library library_of<cublasStatus_t> = Library::cublas;

// The thread's newest failure, with its text; empty for what CUDA's own words say already. cudaErrorNotReady
// and ncclInProgress are kept as CUDA and NCCL do.
int32_t fail(Library library, int32_t result, std::string_view text);

// That a call has met (failures.h).
struct MachineFailure {
  Library library;
  int32_t result;
  std::string text;

  // For the agent: the same words if it happens again. What NCCL says differs by ports and times.
  std::string describe() const {
    const std::string number = std::to_string(result);
    if (library == Library::cudart) return "CUDA error " + number + ": " + text;
    return (library == Library::nccl ? "NCCL error " : "cuBLAS status ") + number;
  }
};

// What a library says without its device.
constexpr int32_t device_gone(Library library) {
  return in_words_of(library, cudaErrorDevicesUnavailable, ncclSystemError, CUBLAS_STATUS_NOT_INITIALIZED);
}

// cudaGetLastError's: what it would return now.
cudaError_t newest_error();

// The function is one that the proxy does not carry: says so, in that sentence without its end, the first
// time.
void name_refused(const char* function, const std::string& text);
// The same, in words for all, and as the thread's error.
int32_t refuse_by_name(Library library, const char* function);

template <class Result>
Result refuse(const char* function) {
  return Result(refuse_by_name(library_of<Result>, function));
}

// The caller gave a null pointer for something that is made.
template <class Result>
Result no_place() {
  return Result(fail(library_of<Result>,
                     in_words_of(library_of<Result>, cudaErrorInvalidValue, ncclInvalidArgument,
                                 CUBLAS_STATUS_INVALID_VALUE),
                     "no place to put the result"));
}

}  // namespace jitckpt::proxy::client
