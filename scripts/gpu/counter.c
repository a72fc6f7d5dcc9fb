/* A library that counts kernel launches and passes them on: preloaded once before libjitckpt.so (-DNAME=before) and once
 * after it (-DNAME=after), it tells whether a launch is lost or repeated on the way. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

typedef struct {
  unsigned x, y, z;
} dim3_t;

static atomic_int count;

int JOIN(JOIN(launches_, NAME), _jitckpt)(void) { return atomic_load(&count); }

static void* next(const char* name, void** cached) {
  if (*cached == NULL) *cached = dlsym(RTLD_NEXT, name);
  atomic_fetch_add(&count, 1);
  return *cached;
}

typedef int (*launch_t)(const void*, dim3_t, dim3_t, void**, size_t, void*);
typedef int (*launch_ex_t)(const void*, const void*, void**);

#define LAUNCH(name)                                                                                      \
  int name(const void* function, dim3_t grid, dim3_t block, void** arguments, size_t shared, void* stream) { \
    static void* real;                                                                                    \
    return ((launch_t)next(#name, &real))(function, grid, block, arguments, shared, stream);              \
  }
#define LAUNCH_EX(name)                                                         \
  int name(const void* configuration, const void* function, void** arguments) { \
    static void* real;                                                          \
    return ((launch_ex_t)next(#name, &real))(configuration, function, arguments); \
  }

LAUNCH(cudaLaunchKernel)
LAUNCH(__cudaLaunchKernel)
LAUNCH_EX(cudaLaunchKernelExC)
