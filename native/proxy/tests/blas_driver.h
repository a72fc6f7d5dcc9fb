// Calls cuBLAS's functions with drawn arguments: directly or through the proxy, the same ones.
#pragma once
#include <cstdint>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "device_api/libraries.h"

namespace driver {

class Driver {
 public:
  // library: where the functions are, as dlopen gave it.
  Driver(void* library, uint64_t seed);

  // A handle, a description and what belongs to it, with drawn settings; then each call once, in a drawn
  // order; then they end.
  void run();
  // All that the program has got back, a line a call.
  const std::string& seen() const { return seen_; }

  template <class Function>
  Function* find(const char* name) {
    return reinterpret_cast<Function*>(find_any(name));
  }

  cublasHandle_t blas() { return handle_; }
  cublasLtHandle_t light() { return reinterpret_cast<cublasLtHandle_t>(handle_); }
  cublasLtMatmulDesc_t description() { return description_; }
  cublasLtMatrixLayout_t layout() { return pick(layouts_); }
  cublasLtMatmulPreference_t preference() { return preference_; }

  template <class Value>
  Value draw() {
    if constexpr (std::is_same_v<Value, cudaDataType_t>)
      return pick<Value>({CUDA_R_16F, CUDA_R_32F, CUDA_R_64F, CUDA_C_32F, CUDA_C_64F});
    else if constexpr (std::is_same_v<Value, cublasComputeType_t>)
      return pick<Value>({CUBLAS_COMPUTE_16F, CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F, CUBLAS_COMPUTE_32I});
    else if constexpr (std::is_same_v<Value, cublasLtMatmulDescAttributes_t>)
      return static_cast<Value>(3 + random_() % 3);  // none that the echo has to understand
    else if constexpr (std::is_enum_v<Value>)
      return static_cast<Value>(random_() % 2);  // all have these
    else
      return static_cast<Value>(random_());
  }
  // Of memory on the device, at which nobody looks; now and then none.
  void* address();
  // Where a call finds a number, or puts one: on the host or on the device, as the mode says.
  void* place(bool on_device);
  bool on_device() const { return on_device_; }
  bool factors_on_device(bool beta) const;
  // So many bytes; the number is drawn.
  std::vector<std::byte> content();
  // A structure, or null.
  template <class Structure>
  const Structure* structure() {
    if (random_() % 4 == 0) return nullptr;
    Structure made;
    for (auto& word : made.data) word = random_();
    return new (keep(sizeof made)) Structure(made);
  }

  void saw(const char* call, cublasStatus_t status);
  void saw(const void* begin, std::size_t bytes);

  template <class Item>
  Item pick(const std::vector<Item>& items) {
    return items[random_() % items.size()];
  }

 private:
  void* find_any(const char* name);
  void* keep(std::size_t bytes);  // until the end
  void begin();
  void end();

  void* library_;
  std::mt19937_64 random_;
  std::deque<std::vector<uint64_t>> kept_;
  std::string seen_;
  cublasHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t description_ = nullptr;
  cublasLtMatmulPreference_t preference_ = nullptr;
  std::vector<cublasLtMatrixLayout_t> layouts_;
  bool on_device_ = false;
  cublasLtPointerMode_t mode_ = CUBLASLT_POINTER_MODE_HOST;
};

// Written from calls.toml: what calls each function once.
using Call = void (*)(Driver&);
const std::vector<Call>& calls();

}  // namespace driver
