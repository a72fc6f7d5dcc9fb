// A cuBLAS that computes nothing: it writes down what it is called with, a line a call, into the file that
// BLAS_ECHO names, and answers with numbers that follow from how many calls there were. So what arrives
// through the proxy can be compared with what was sent.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "device_api/libraries.h"

namespace echo {

// What handles and descriptions point to here. What the calls that make and set them are to remember.
struct Thing {
  uint64_t number;  // from 1, in the order in which they were made
  bool on_device = false;
  cudaDataType_t scale_type = CUDA_R_32F;
  cublasLtPointerMode_t mode = CUBLASLT_POINTER_MODE_HOST;
};
Thing* make();
void end(void* thing);

std::size_t bytes_of(cudaDataType_t type);  // of one number

// Alpha or beta.
struct Number {
  const void* begin;
  std::size_t bytes;
  bool on_device;
};
Number number(cublasHandle_t handle, const void* begin, std::size_t bytes);
Number number(cublasHandle_t handle, const void* begin, cublasComputeType_t compute,
              cudaDataType_t of_result);
Number number(cublasLtMatmulDesc_t description, const void* begin, bool is_beta);

class Line {
 public:
  explicit Line(const char* call);
  ~Line();  // writes it
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  void thing(const void* handle);
  void stream(cudaStream_t stream);
  void pointer(const void* pointer);
  void bytes(const void* begin, std::size_t bytes);  // or null
  void number(const Number& number);
  template <class Value>
  void value(Value value) {
    bytes(&value, sizeof value);
  }
  // Fills it with what follows from the number of the call.
  void invent(void* begin, std::size_t bytes);
  template <class Value>
  void invent(Value* value) {
    if (!value) return;
    if constexpr (std::is_enum_v<Value>)
      *value = Value(1);
    else
      invent(value, sizeof *value);
  }

 private:
  std::string text_;
};

}  // namespace echo
