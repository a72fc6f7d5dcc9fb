// How softgpu's functions fail: inside by throwing CudaFailure, outside by an error code that the thread
// remembers.
#pragma once
#include <new>
#include <string>
#include <system_error>

#include "softgpu/runtime/cudart.h"

namespace softgpu {

// text adds to CUDA's own words what happened here: a sentence, or empty.
struct CudaFailure {
  cudaError_t error;
  std::string text;
};

// Makes the failure the thread's last error, with its text for cudaGetErrorString.
cudaError_t remember(const CudaFailure& failure) noexcept;

// Fails if the process can't use the device (any more): after fork, or while it exits.
void check_process();

// Runs the body of one cudart function. The body returns its error (cudaErrorNotReady is no failure) or
// throws.
template <class Body>
cudaError_t call(Body body) noexcept {
  try {
    check_process();
    const cudaError_t error = body();
    return error == cudaSuccess ? error : remember({error, ""});
  } catch (const CudaFailure& failure) {
    return remember(failure);
  } catch (const std::bad_alloc&) {
    return remember({cudaErrorMemoryAllocation, "the host is out of memory"});
  } catch (const std::system_error& error) {
    return remember({cudaErrorOperatingSystem, error.what()});
  }
}

void require(bool condition, cudaError_t error, const char* text);

// Of a pointer to where the caller wants a result, which may be null.
void require_place(const void* place);

}  // namespace softgpu
