// Which failures are those of a device, a driver or the network, and so may be gone with another server.
#pragma once
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>

namespace jitckpt::proxy {

// In the order of Control::errors.
enum class Library : uint8_t { cudart, nccl };

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
