/* A library that counts kernel launches and allocations of device memory, and passes them on: preloaded once before
 * libjitckpt.so (-DNAME=before) and once after it (-DNAME=after), it tells whether a launch is lost or repeated on the way,
 * and whether anybody allocates while a save is made. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

typedef struct {
  unsigned x, y, z;
} dim3_t;

static atomic_int launches, allocations;

int JOIN(JOIN(launches_, NAME), _jitckpt)(void) { return atomic_load(&launches); }
int JOIN(JOIN(allocations_, NAME), _jitckpt)(void) { return atomic_load(&allocations); }

static void* next(const char* name, void** cached, atomic_int* count) {
  if (*cached == NULL) *cached = dlsym(RTLD_NEXT, name);
  atomic_fetch_add(count, 1);
  return *cached;
}

typedef int (*launch_t)(const void*, dim3_t, dim3_t, void**, size_t, void*);
typedef int (*launch_ex_t)(const void*, const void*, void**);

#define LAUNCH(name)                                                                                      \
  int name(const void* function, dim3_t grid, dim3_t block, void** arguments, size_t shared, void* stream) { \
    static void* real;                                                                                    \
    return ((launch_t)next(#name, &real, &launches))(function, grid, block, arguments, shared, stream);              \
  }
#define LAUNCH_EX(name)                                                         \
  int name(const void* configuration, const void* function, void** arguments) { \
    static void* real;                                                          \
    return ((launch_ex_t)next(#name, &real, &launches))(configuration, function, arguments); \
  }

LAUNCH(cudaLaunchKernel)
LAUNCH(__cudaLaunchKernel)
LAUNCH_EX(cudaLaunchKernelExC)

int cudaMalloc(void** address, size_t bytes) {
  static void* real;
  return ((int (*)(void**, size_t))next("cudaMalloc", &real, &allocations))(address, bytes);
}

int cudaMallocAsync(void** address, size_t bytes, void* stream) {
  static void* real;
  return ((int (*)(void**, size_t, void*))next("cudaMallocAsync", &real, &allocations))(address, bytes, stream);
}
