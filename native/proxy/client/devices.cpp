// Which device a thread uses is the thread's own affair; and small calls that others stand for.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "proxy/client/connection.h"
#include "proxy/client/requests.h"
#include "proxy/client/thread.h"
#include "proxy_by_hand.h"

using namespace jitckpt::proxy;
using namespace jitckpt::proxy::client;

// Asked once: it never changes, and torch wants to know before every launch.
cudaError_t cudaGetDeviceCount(int* count) {
  static std::atomic<int> known{0};
  if (!count) return no_place<cudaError_t>();
  int32_t failure = 0;
  if (!Connection::get(Library::cudart, failure)) return cudaError_t(failure);
  *count = known.load(std::memory_order_relaxed);
  if (*count != 0) return cudaSuccess;
  wire::device_count_answer answer;
  const auto result = look<cudaError_t>(Call::device_count, wire::device_count{}, answer);
  if (result == cudaSuccess) known = *count = answer.count;
  return result;
}

cudaError_t cudaSetDevice(int device) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) return error;
  if (device < 0 || device >= count)
    return cudaError_t(fail(Library::cudart, cudaErrorInvalidDevice, "there is no device of this number"));
  this_thread().device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  if (!device) return no_place<cudaError_t>();
  *device = this_thread().device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  if (!text) return no_place<cudaError_t>();
  wire::pci_bus_id_answer answer;
  const auto result = look<cudaError_t>(Call::pci_bus_id, wire::pci_bus_id{device}, answer);
  if (result != cudaSuccess) return result;
  answer.text[sizeof answer.text - 1] = '\0';
  if (std::strlen(answer.text) >= static_cast<std::size_t>(std::max(length, 0)))
    return cudaError_t(fail(Library::cudart, cudaErrorInvalidValue, "no room for the PCI bus id"));
  std::strcpy(text, answer.text);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

// A function of the driver would act on a device that this process does not have.
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  if (!function) return no_place<cudaError_t>();
  *function = nullptr;
  if (!result) return refuse<cudaError_t>("cudaGetDriverEntryPointByVersion");
  *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// For the libcuda.so.1 of a process that has no device, which programs ask which device they use already: the
// one that the thread has chosen.
#pragma GCC visibility push(default)
extern "C" int softgpu_device_active(int device);
#pragma GCC visibility pop
int softgpu_device_active(int device) { return this_thread().device == device; }
