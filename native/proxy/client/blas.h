// cuBLAS: what its calls' generated code needs. Numbers such as alpha lie on the host or on the device;
// which, a handle's or a description's pointer mode says.
#pragma once
#include <cstddef>
#include <cstdint>

#include "proxy/client/requests.h"

namespace jitckpt::proxy::client {

// Of alpha and beta (cuBLAS reference, cublasGemmEx: "Supported types"); of one number of a type.
std::size_t scalar_bytes(cublasComputeType_t compute, cudaDataType_t of_result);
std::size_t bytes_of_type(cudaDataType_t type);

wire::Scalar scalar(cublasHandle_t handle, const void* number, std::size_t bytes);
enum class Factor : uint8_t { alpha, beta };
wire::Scalar scalar(cublasLtMatmulDesc_t description, const void* number, Factor factor);

// Where a call is to put its result on the device; 0: on the host, so that somebody waits for it.
uint64_t result_address(cublasHandle_t handle, const void* result);

template <class Structure>
wire::Given<Structure> given(const Structure* structure) {
  wire::Given<Structure> given{};
  if (structure) given = {*structure, 1};
  return given;
}

inline Bytes bytes_at(const void* begin, std::size_t bytes) {
  return {static_cast<const std::byte*>(begin), begin ? bytes : 0};
}

}  // namespace jitckpt::proxy::client
