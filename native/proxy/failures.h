// Which failures are those of a device, a driver or the network, and so may be gone with another server.
#pragma once
#include <cstddef>
#include <cstdint>

#include "device_api/libraries.h"
#include "proxy/transport/layout.h"

namespace jitckpt::proxy {

// In the order of Control::errors.
enum class Library : uint8_t { cudart, nccl, cublas };
static_assert(static_cast<std::size_t>(Library::cublas) + 1 == library_count);

// The same in the words of the library that is asked.
constexpr int32_t in_words_of(Library library, cudaError_t cudart, ncclResult_t nccl, cublasStatus_t cublas) {
  return library == Library::cudart ? int32_t{cudart}
         : library == Library::nccl ? int32_t{nccl}
                                    : int32_t{cublas};
}

// Others are the program's own (a wrong argument), or it can deal with them (memory that is not there).
// For CUDA those of which its reference says that only another process can go on (Runtime API, "Data types
// used by CUDA Runtime"), and cudaErrorUnknown, which is what a lost device gives.
constexpr bool is_of_the_machine(Library library, int32_t result) {
  if (library == Library::nccl) {
    switch (result) {
      case ncclUnhandledCudaError:
      case ncclSystemError:
      case ncclInternalError:
      case ncclRemoteError:
        return true;
      default:
        return result > ncclInProgress;  // of a newer NCCL: ncclTimeout
    }
  }
  if (library == Library::cublas) {
    return result == CUBLAS_STATUS_EXECUTION_FAILED || result == CUBLAS_STATUS_INTERNAL_ERROR ||
           result == CUBLAS_STATUS_MAPPING_ERROR;
  }
  switch (result) {
    case cudaErrorDevicesUnavailable:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorExternalDevice:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

}  // namespace jitckpt::proxy
