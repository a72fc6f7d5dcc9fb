#include "device_api/real_symbols.h"

#include <dlfcn.h>

#include <cstdio>
#include <span>

namespace jitckpt::real {
namespace {

// torch loads NCCL with RTLD_LOCAL, so that RTLD_NEXT does not see it: it is found by its name among what is
// loaded.
constexpr const char* cudart_names[] = {"libcudart.so.13", "libcudart.so.12"};
constexpr const char* cuda_names[] = {"libcuda.so.1"};
constexpr const char* nccl_names[] = {"libnccl.so.2"};
constexpr const char* cublas_names[] = {"libcublas.so.13", "libcublas.so.12", "libcublasLt.so.13",
                                        "libcublasLt.so.12"};

std::span<const char* const> names_of(Library library) noexcept {
  switch (library) {
    case Library::cudart:
      return cudart_names;
    case Library::cuda:
      return cuda_names;
    case Library::nccl:
      return nccl_names;
    case Library::cublas:
      return cublas_names;
  }
  return {};
}

void* find_loaded(std::span<const char* const> libraries, const char* name) noexcept {
  for (const char* library : libraries) {
    void* handle = dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
    void* symbol = handle ? dlsym(handle, name) : nullptr;
    if (handle) dlclose(handle);
    if (symbol) return symbol;
  }
  return nullptr;
}

}  // namespace

void* find(Library library, const char* name) noexcept {
  if (void* symbol = dlsym(RTLD_NEXT, name)) return symbol;
  void* symbol = find_loaded(names_of(library), name);
  if (!symbol) {
    std::fprintf(stderr, "jitckpt: %s was called, but no library that is loaded has it: load %s first.\n",
                 name, names_of(library)[0]);
  }
  return symbol;
}

}  // namespace jitckpt::real
