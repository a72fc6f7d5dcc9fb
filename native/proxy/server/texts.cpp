// Small answers in words.
#include "proxy/server/server.h"
#include "proxy/server/services.h"
#include "proxy/transport/answer.h"
#include "real_calls.h"

namespace jitckpt::proxy {

int32_t serve_device_count(Request& request) {
  return real::cudaGetDeviceCount(&request.answer<wire::device_count_answer>().count);
}

int32_t serve_pci_bus_id(Request& request) {
  auto& answer = request.answer<wire::pci_bus_id_answer>();
  return real::cudaDeviceGetPCIBusId(answer.text, sizeof answer.text,
                                     request.arguments<wire::pci_bus_id>().device);
}

int32_t serve_error_text(Request& request) {
  const auto arguments = request.arguments<wire::error_text>();
  auto& answer = request.answer<wire::error_text_answer>();
  if (arguments.nccl) {
    put_text(answer.name, sizeof answer.name, "");
    put_text(answer.text, sizeof answer.text,
             real::ncclGetErrorString(static_cast<ncclResult_t>(arguments.error)));
  } else {
    const auto error = static_cast<cudaError_t>(arguments.error);
    put_text(answer.name, sizeof answer.name, real::cudaGetErrorName(error));
    put_text(answer.text, sizeof answer.text, real::cudaGetErrorString(error));
  }
  return 0;
}

}  // namespace jitckpt::proxy
