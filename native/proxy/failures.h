// The results of the three libraries that a server calls, as one kind of number.
#pragma once
#include <cstddef>
#include <cstdint>

#include "device_api/results.h"
#include "proxy/transport/layout.h"

namespace jitckpt::proxy {

using jitckpt::Library;
// ControlBlock::errors has them in this order. No server calls the driver, Library::cuda, by a client's
// order.
static_assert(static_cast<std::size_t>(Library::cublas) + 1 == library_count);

// The same in the words of the library that is asked.
constexpr int32_t in_words_of(Library library, cudaError_t cudart, ncclResult_t nccl, cublasStatus_t cublas) {
  return library == Library::cudart ? int32_t{cudart}
         : library == Library::nccl ? int32_t{nccl}
                                    : int32_t{cublas};
}

constexpr bool is_of_the_machine(Library library, int32_t result) {
  switch (library) {
    case Library::nccl:
      return jitckpt::is_of_the_machine(static_cast<ncclResult_t>(result));
    case Library::cublas:
      return jitckpt::is_of_the_machine(static_cast<cublasStatus_t>(result));
    case Library::cudart:
    case Library::cuda:
      break;
  }
  return jitckpt::is_of_the_machine(static_cast<cudaError_t>(result));
}

}  // namespace jitckpt::proxy
