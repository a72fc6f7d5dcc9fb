#include "real_symbols.h"

#include <dlfcn.h>

#include <cstdio>
#include <iterator>

namespace jitckpt::real {
namespace {

// torch loads NCCL with RTLD_LOCAL, so that RTLD_NEXT does not see it: it is found by its name among what is
// loaded.
constexpr const char* cudart_names[] = {"libcudart.so.13", "libcudart.so.12"};
constexpr const char* nccl_names[] = {"libnccl.so.2"};

template <std::size_t Count>
void* find_loaded(const char* const (&libraries)[Count], const char* name) noexcept {
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
  void* symbol = library == Library::nccl ? find_loaded(nccl_names, name) : find_loaded(cudart_names, name);
  if (!symbol) {
    std::fprintf(stderr, "jitckpt: %s was called, but no library that is loaded has it: load %s first.\n",
                 name, library == Library::nccl ? nccl_names[0] : cudart_names[0]);
  }
  return symbol;
}

}  // namespace jitckpt::real
