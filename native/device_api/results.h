// Which results are the fault of a device, a driver or the network, and so may be gone in another process.
#pragma once

#include "device_api/libraries.h"

namespace jitckpt {

// Others are the program's own (a wrong argument), or it can deal with them (memory that is not there).
constexpr bool is_of_the_machine(ncclResult_t result) {
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

constexpr bool is_of_the_machine(cublasStatus_t result) {
  return result == CUBLAS_STATUS_EXECUTION_FAILED || result == CUBLAS_STATUS_INTERNAL_ERROR ||
         result == CUBLAS_STATUS_MAPPING_ERROR;
}

// Those of which CUDA's reference says that only another process can go on (Runtime API, "Data types used by
// CUDA Runtime"), and cudaErrorUnknown, which is what a lost device gives.
constexpr bool is_of_the_machine(cudaError_t result) {
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

}  // namespace jitckpt
