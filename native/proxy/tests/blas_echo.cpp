#include "proxy/tests/blas_echo.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace echo {
namespace {

uint64_t calls = 0, things = 0;  // the calls come one after the other

std::string hexadecimal(const void* begin, std::size_t bytes) {
  std::string text;
  char byte[3];
  for (std::size_t index = 0; index < bytes; ++index) {
    std::snprintf(byte, sizeof byte, "%02x",
                  static_cast<unsigned>(static_cast<const unsigned char*>(begin)[index]));
    text += byte;
  }
  return text;
}

}  // namespace

std::size_t bytes_of(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_16F:
      return 2;
    case CUDA_R_64F:
    case CUDA_C_32F:
      return 8;
    case CUDA_C_64F:
      return 16;
    default:
      return 4;
  }
}

Thing* make() { return new Thing{++things}; }
void end(void* thing) { delete static_cast<Thing*>(thing); }

Number number(cublasHandle_t handle, const void* begin, std::size_t bytes) {
  return {begin, bytes, reinterpret_cast<const Thing*>(handle)->on_device};
}

// The scale type of the table in cuBLAS's reference for cublasGemmEx.
Number number(cublasHandle_t handle, const void* begin, cublasComputeType_t compute,
              cudaDataType_t of_result) {
  const bool complex = of_result == CUDA_C_32F || of_result == CUDA_C_64F;
  cudaDataType_t scale = CUDA_R_32F;
  if (compute == CUBLAS_COMPUTE_16F) scale = CUDA_R_16F;
  if (compute == CUBLAS_COMPUTE_32I) scale = CUDA_R_32I;
  if (compute == CUBLAS_COMPUTE_64F) scale = complex ? CUDA_C_64F : CUDA_R_64F;
  if (compute == CUBLAS_COMPUTE_32F && complex) scale = CUDA_C_32F;
  return number(handle, begin, bytes_of(scale));
}

Number number(cublasLtMatmulDesc_t description, const void* begin, bool is_beta) {
  const auto& thing = *reinterpret_cast<const Thing*>(description);
  const bool on_host = thing.mode == CUBLASLT_POINTER_MODE_HOST ||
                       (thing.mode == CUBLASLT_POINTER_MODE_ALPHA_DEVICE_VECTOR_BETA_HOST && is_beta);
  return {begin, bytes_of(thing.scale_type), !on_host};
}

Line::Line(const char* call) : text_(call) { ++calls; }

Line::~Line() {
  const char* const path = std::getenv("BLAS_ECHO");
  if (!path) return;
  text_ += '\n';
  const int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (file < 0 || write(file, text_.data(), text_.size()) != static_cast<ssize_t>(text_.size())) std::abort();
  close(file);
}

void Line::thing(const void* handle) {
  text_ += handle ? " #" : " null";
  if (handle) text_ += std::to_string(static_cast<const Thing*>(handle)->number);
}
void Line::stream(cudaStream_t stream) { text_ += stream ? " stream" : " default-stream"; }
void Line::pointer(const void* pointer) { bytes(&pointer, sizeof pointer); }
void Line::bytes(const void* begin, std::size_t bytes) {
  text_ += begin ? " " : " null";
  if (begin) text_ += hexadecimal(begin, bytes);
}
void Line::number(const Number& number) {
  if (number.on_device)
    pointer(number.begin);
  else
    bytes(number.begin, number.bytes);
}
void Line::invent(void* begin, std::size_t bytes) {
  std::memset(begin, 0, bytes);
  const uint64_t number = calls * 0x9e3779b97f4a7c15u >> 34;  // also a number that an int can hold
  std::memcpy(begin, &number, bytes < 4 ? bytes : 4);
}

}  // namespace echo

// What has something to remember, and so is not generated.
extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  const echo::Line line("cublasCreate_v2");
  *handle = reinterpret_cast<cublasHandle_t>(echo::make());
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  echo::Line line("cublasSetPointerMode_v2");
  line.thing(handle);
  line.value(mode);
  reinterpret_cast<echo::Thing*>(handle)->on_device = mode == CUBLAS_POINTER_MODE_DEVICE;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  echo::Line line("cublasLtMatmulDescCreate");
  line.value(compute);
  line.value(scale);
  echo::Thing* const thing = echo::make();
  thing->scale_type = scale;
  *made = reinterpret_cast<cublasLtMatmulDesc_t>(thing);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t which, const void* content,
                                              size_t bytes) {
  echo::Line line("cublasLtMatmulDescSetAttribute");
  line.thing(description);
  line.value(which);
  line.bytes(content, bytes);
  auto& thing = *reinterpret_cast<echo::Thing*>(description);
  if (which == CUBLASLT_MATMUL_DESC_SCALE_TYPE)
    std::memcpy(&thing.scale_type, content, sizeof thing.scale_type);
  if (which == CUBLASLT_MATMUL_DESC_POINTER_MODE) std::memcpy(&thing.mode, content, sizeof thing.mode);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t description,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t* results, int* found) {
  echo::Line line("cublasLtMatmulAlgoGetHeuristic");
  for (const void* const thing :
       {static_cast<const void*>(handle), static_cast<const void*>(description), static_cast<const void*>(a),
        static_cast<const void*>(b), static_cast<const void*>(c), static_cast<const void*>(d),
        static_cast<const void*>(preference)})
    line.thing(thing);
  line.value(requested);
  *found = requested > 1 ? requested - 1 : requested;
  for (int which = 0; which < *found; ++which) {
    std::memset(&results[which], 0, sizeof results[which]);
    line.invent(results[which].algo.data, sizeof results[which].algo.data);
    results[which].workspaceSize = static_cast<std::size_t>(which);
  }
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
