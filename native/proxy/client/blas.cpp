#include "proxy/client/blas.h"

#include <link.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>

#include "proxy/client/objects.h"
#include "proxy_by_hand.h"

namespace jitckpt::proxy::client {
namespace {

bool is_complex(cudaDataType_t type) {
  return type == CUDA_C_16F || type == CUDA_C_16BF || type == CUDA_C_32F || type == CUDA_C_64F ||
         type == CUDA_C_8I;
}

wire::Scalar packed(const void* number, bool on_host, std::size_t bytes) {
  wire::Scalar scalar;
  if (!number) return scalar;
  scalar.given = 1;
  if (on_host)
    std::memcpy(scalar.value, number, std::min(bytes, sizeof scalar.value));
  else
    scalar.address = reinterpret_cast<uint64_t>(number);
  return scalar;
}

bool numbers_on_host(cublasHandle_t handle) {
  const auto mode = setting<wire::cublasSetPointerMode_v2>(number_of(handle), Call::cublasSetPointerMode_v2);
  return !mode || mode->mode == CUBLAS_POINTER_MODE_HOST;
}

// Of an attribute that is one number of 32 bits.
int32_t attribute(cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t which, int32_t otherwise) {
  constexpr std::size_t front = sizeof(wire::cublasLtMatmulDescSetAttribute);
  using Content = std::array<std::byte, front + sizeof(int32_t)>;  // a structure of both would be padded
  const auto found = setting<Content>(number_of(description), Call::cublasLtMatmulDescSetAttribute,
                                      static_cast<uint64_t>(which));
  int32_t value = otherwise;
  if (found) std::memcpy(&value, found->data() + front, sizeof value);
  return value;
}

// cuBLAS as the program has loaded it; empty if it has not.
std::string library_path() {
  std::string path;
  const auto look = [](dl_phdr_info* info, std::size_t, void* found) {
    const std::string_view name = info->dlpi_name ? info->dlpi_name : "";
    const std::size_t slash = name.rfind('/');
    if (slash == name.npos || !name.substr(slash + 1).starts_with("libcublas.so")) return 0;
    *static_cast<std::string*>(found) = name;
    return 1;
  };
  dl_iterate_phdr(look, &path);
  return path;
}

}  // namespace

std::size_t bytes_of_type(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_16F:
    case CUDA_R_16BF:
      return 2;
    case CUDA_R_32F:
    case CUDA_R_32I:
    case CUDA_C_16F:
    case CUDA_C_16BF:
      return 4;
    case CUDA_R_64F:
    case CUDA_C_32F:
      return 8;
    case CUDA_C_64F:
      return 16;
    default:
      return 1;  // there are no such numbers: cuBLAS will say so itself
  }
}

std::size_t scalar_bytes(cublasComputeType_t compute, cudaDataType_t of_result) {
  switch (compute) {
    case CUBLAS_COMPUTE_16F:
    case CUBLAS_COMPUTE_16F_PEDANTIC:
      return 2;
    case CUBLAS_COMPUTE_32I:
    case CUBLAS_COMPUTE_32I_PEDANTIC:
      return 4;
    case CUBLAS_COMPUTE_64F:
    case CUBLAS_COMPUTE_64F_PEDANTIC:
      return is_complex(of_result) ? 16 : 8;
    default:
      // Newer ways of double precision have numbers of their own.
      if (of_result == CUDA_R_64F || of_result == CUDA_C_64F) return bytes_of_type(of_result);
      return is_complex(of_result) ? 8 : 4;
  }
}

wire::Scalar scalar(cublasHandle_t handle, const void* number, std::size_t bytes) {
  return packed(number, numbers_on_host(handle), bytes);
}

wire::Scalar scalar(cublasLtMatmulDesc_t description, const void* number, Factor factor) {
  const auto made = made_by<wire::cublasLtMatmulDescCreate>(number_of(description));
  const auto type = static_cast<cudaDataType_t>(
      attribute(description, CUBLASLT_MATMUL_DESC_SCALE_TYPE, made ? int32_t{made->scaleType} : CUDA_R_32F));
  const int32_t mode = attribute(description, CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_HOST);
  const bool on_host =
      mode == CUBLASLT_POINTER_MODE_HOST ||
      (mode == CUBLASLT_POINTER_MODE_ALPHA_DEVICE_VECTOR_BETA_HOST && factor == Factor::beta);
  return packed(number, on_host, bytes_of_type(type));
}

uint64_t result_address(cublasHandle_t handle, const void* result) {
  return numbers_on_host(handle) ? 0 : reinterpret_cast<uint64_t>(result);
}

}  // namespace jitckpt::proxy::client

using namespace jitckpt::proxy;
using namespace jitckpt::proxy::client;

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  if (!handle) return no_place<cublasStatus_t>();
  const std::string path = library_path();
  const wire::make_blas arguments{new_handle(), path.size()};
  const Bytes path_bytes = std::as_bytes(std::span(path));
  const auto status = ask<cublasStatus_t>(Call::make_blas, arguments, path_bytes);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  note_object(arguments.handle, Call::make_blas, bytes_of(arguments), path_bytes);
  *handle = reinterpret_cast<cublasHandle_t>(arguments.handle);
  return status;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t description,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t* results, int* found) {
  if (!results || !found) return no_place<cublasStatus_t>();
  const wire::matmul_heuristic arguments{
      number_of(handle),
      number_of(description),
      {number_of(a), number_of(b), number_of(c), number_of(d)},
      number_of(preference),
      std::min(requested, static_cast<int>(wire::most_heuristics))};  // it may find fewer in any case
  wire::matmul_heuristic_answer answer;
  const auto status = ask<cublasStatus_t>(Call::matmul_heuristic, arguments, answer);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  std::copy_n(answer.results, answer.found, results);
  *found = answer.found;
  return status;
}
