// How a library brings kernels to softgpu: the "device code" of a softgpu module is a table of C functions.
//
// The ordinary path of CUDA registers it: __cudaRegisterFatBinary with a wrapper whose data points to a
// softgpu_module_t instead of NVIDIA's code, then __cudaRegisterFunction for every kernel (its name finds the
// entry in the table, its host stub's address is what launches name). A launch copies the parameters by the
// kernel's layout, and calls `run` on the stream's thread. Plain C, so that any compiler can make a module.
#ifndef SOFTGPU_MODULE_H
#define SOFTGPU_MODULE_H
#include <driver_types.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

#define SOFTGPU_MODULE_MAGIC 0x3155504754464f53ull  // "SOFTGPU1" as little-endian bytes
#define SOFTGPU_FATBIN_WRAPPER_MAGIC 0x466243b1     // as in NVIDIA's fatbinary wrapper
#define SOFTGPU_MAX_PARAMETER_BYTES 32764  // all parameters of one kernel, as on compute capability 9.0

#define SOFTGPU_UPLOAD "softgpu_upload"  // a kernel that does nothing but put its parameter somewhere

// What a running kernel knows of its launch. Valid until `run` returns.
typedef struct softgpu_launch {
  const char* kernel;  // its name in the module
  unsigned grid[3], block[3];
  size_t shared_bytes;
  int device;
  cudaStream_t stream;  // only to name it: a kernel must not call the CUDA runtime
  void* failure;        // the runtime's own
} softgpu_launch_t;

// One parameter: where it lies in the parameter block and how long it is, both in bytes.
typedef struct softgpu_parameter {
  size_t offset, size;
} softgpu_parameter_t;

// arguments[i] points to the copy of parameter i. It is writable and the kernel's own.
typedef void (*softgpu_run_t)(void** arguments, softgpu_launch_t* launch);

typedef struct softgpu_kernel {
  const char* name;
  softgpu_run_t run;
  const softgpu_parameter_t* parameters;
  size_t parameter_count;
} softgpu_kernel_t;

typedef struct softgpu_module {
  uint64_t magic;  // SOFTGPU_MODULE_MAGIC
  const softgpu_kernel_t* kernels;
  size_t kernel_count;
} softgpu_module_t;

// What __cudaRegisterFatBinary is given; NVIDIA's layout.
typedef struct softgpu_fatbin_wrapper {
  int magic;         // SOFTGPU_FATBIN_WRAPPER_MAGIC
  int version;       // 1
  const void* data;  // a softgpu_module_t
  void* unused;
} softgpu_fatbin_wrapper_t;

// The address at which a kernel may read and write what a device pointer points to. Other addresses (pinned
// or registered host memory) come back unchanged. The device pointer itself faults for everybody.
void* softgpu_shadow(const void* device_pointer);

// The kernel has failed: the device takes on `error` for good, as after an illegal address on a GPU; every
// later call fails with it. The text (a sentence; copied) goes to stderr and into cudaGetErrorString.
void softgpu_fail(softgpu_launch_t* launch, cudaError_t error, const char* text);

#ifdef __cplusplus
}
#endif
#endif
