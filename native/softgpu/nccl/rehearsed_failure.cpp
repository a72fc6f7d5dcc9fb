#include "softgpu/nccl/rehearsed_failure.h"

#include "softgpu/nccl/failure.h"
#include "softgpu/runtime/enqueue.h"

namespace softgpu::nccl {

void suffer(Communicator& communicator, const Fault& fault) {
  if (fault.kind == FaultKind::collective_error) {
    const char* const text = fault.system_error ? "A call of the system failed (rehearsed)"
                                                : "Connection closed by remote peer (rehearsed)";
    set_asynchronous_error(text);
    communicator.set_state(fault.system_error ? ncclSystemError : ncclRemoteError, text);
  } else if (fault.kind != FaultKind::collective_hang) {
    fail_device(communicator.device, error_of(fault.kind));
  }
  communicator.wait_until_stopped();
}

}  // namespace softgpu::nccl
