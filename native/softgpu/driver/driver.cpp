// libcuda.so.1 for processes that softgpu is preloaded into. Programs open it by name; what torch asks it for
// is which device is in use. Without softgpu in the process it says that there is no device. All else is
// refused (refused_calls).
#pragma GCC visibility push(default)
#include <cuda.h>
#include <cuda_runtime_api.h>
#pragma GCC visibility pop

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

extern "C" {
// In libsoftgpu.so, or nowhere.
__attribute__((weak)) int softgpu_device_active(int device);
#pragma weak cudaGetDeviceCount
#pragma weak cudaGetDevice
#pragma weak cudaSetDevice
#pragma weak cudaDeviceGetAttribute
#pragma weak cudaGetDeviceProperties
#pragma weak cudaMemGetInfo
#pragma weak cudaPointerGetAttributes
#pragma weak cudaGetErrorName
#pragma weak cudaGetErrorString
}

namespace {

bool present() { return softgpu_device_active != nullptr; }

// The codes of both libraries agree for the errors that the calls below can give.
CUresult result(cudaError_t error) { return static_cast<CUresult>(error); }

bool valid(CUdevice device) {
  int count = 0;
  return present() && cudaGetDeviceCount(&count) == cudaSuccess && device >= 0 && device < count;
}

// A device's primary context is named by the device's number: contexts hold nothing here.
CUcontext context_of(CUdevice device) { return reinterpret_cast<CUcontext>(static_cast<long>(device) + 1); }
CUdevice device_of(CUcontext context) { return static_cast<CUdevice>(reinterpret_cast<long>(context) - 1); }

thread_local const char* refused = nullptr;  // the newest function that this thread was refused

// What to do without the function, for those that programs come upon.
const char* advice(std::string_view function) {
  const bool compiled = function.starts_with("cuModule") || function.starts_with("cuLibrary") ||
                        function.starts_with("cuLaunchKernel");
  return compiled ? " and runs no kernels of torch.compile's or Triton's: train without, or with the "
                    "backends aot_eager or cudagraphs"
                  : "";
}

}  // namespace

// The result of every function of the driver's that softgpu does not have (refused_calls.cmake).
extern "C" int softgpu_refuse_driver_call(const char* function) {
  refused = function;
  return CUDA_ERROR_NOT_SUPPORTED;
}

// For cudaGetDriverEntryPoint: the newest version of a function, which is the one that the header gives its
// plain name to.
extern "C" __attribute__((visibility("default"))) void* softgpu_driver_function(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  for (const char* version : {"_v4", "_v3", "_v2", ""}) {
    if (void* function = dlsym(library, (std::string(name) + version).c_str())) return function;
  }
  return nullptr;
}

CUresult cuInit(unsigned flags) {
  int count = 0;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return present() ? result(cudaGetDeviceCount(&count)) : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int* version) {
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  *count = 0;
  return present() ? result(cudaGetDeviceCount(count)) : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  cudaDeviceProp properties;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, device); error != cudaSuccess)
    return result(error);
  std::strncpy(name, properties.name, static_cast<size_t>(length));
  if (length > 0) name[length - 1] = '\0';
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  cudaDeviceProp properties;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error == cudaSuccess) *bytes = properties.totalGlobalMem;
  return result(error);
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  return result(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  if (!flags || !active) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = softgpu_device_active(device);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (!context) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  *context = context_of(device);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  return valid(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  if (!context) return CUDA_ERROR_INVALID_VALUE;
  int device = 0;
  if (!present()) return CUDA_ERROR_NOT_INITIALIZED;
  const cudaError_t error = cudaGetDevice(&device);
  *context = error == cudaSuccess && softgpu_device_active(device) ? context_of(device) : nullptr;
  return result(error);
}

CUresult cuCtxSetCurrent(CUcontext context) {
  if (!valid(device_of(context))) return CUDA_ERROR_INVALID_CONTEXT;
  return result(cudaSetDevice(device_of(context)));
}

CUresult cuCtxGetDevice(CUdevice* device) {
  return present() ? result(cudaGetDevice(device)) : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult cuMemGetInfo(size_t* free, size_t* total) {
  return present() ? result(cudaMemGetInfo(free, total)) : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (!data) return CUDA_ERROR_INVALID_VALUE;
  if (!present()) return CUDA_ERROR_NOT_INITIALIZED;
  cudaPointerAttributes attributes;
  const cudaError_t error = cudaPointerGetAttributes(&attributes, reinterpret_cast<const void*>(pointer));
  if (error != cudaSuccess) return result(error);
  if (attributes.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(data) = context_of(attributes.device);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<CUmemorytype*>(data) =
          attributes.type == cudaMemoryTypeDevice ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *static_cast<void**>(data) = attributes.devicePointer;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      *static_cast<void**>(data) = attributes.hostPointer;
      return attributes.hostPointer ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(data) = attributes.device;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  *name = nullptr;
  if (!present()) return CUDA_ERROR_NOT_INITIALIZED;
  *name = cudaGetErrorName(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  if (!text) return CUDA_ERROR_INVALID_VALUE;
  *text = nullptr;
  if (!present()) return CUDA_ERROR_NOT_INITIALIZED;
  if (error == CUDA_ERROR_NOT_SUPPORTED && refused) {
    thread_local char explanation[256];
    std::snprintf(explanation, sizeof explanation, "operation not supported: softgpu has no %s%s", refused,
                  advice(refused));
    *text = explanation;
  } else {
    *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  }
  return CUDA_SUCCESS;
}
