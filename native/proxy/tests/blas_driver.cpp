#include "proxy/tests/blas_driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace driver {

Driver::Driver(void* library, uint64_t seed) : library_(library), random_(seed) {}

void* Driver::find_any(const char* name) {
  void* const found = dlsym(library_, name);
  if (found) return found;
  std::fprintf(stderr, "%s is not there\n", name);
  std::abort();
}

void* Driver::keep(std::size_t bytes) {
  kept_.emplace_back((bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t));
  return kept_.back().data();
}

void* Driver::address() {
  return random_() % 16 == 0 ? nullptr : reinterpret_cast<void*>(random_() >> 16 << 4);
}

void* Driver::place(bool on_device) {
  if (on_device) return reinterpret_cast<void*>((random_() >> 16 << 4) + 16);
  auto* const place = static_cast<uint64_t*>(keep(16));
  place[0] = random_();
  place[1] = random_();
  return place;
}

bool Driver::factors_on_device(bool beta) const {
  return mode_ != CUBLASLT_POINTER_MODE_HOST &&
         !(mode_ == CUBLASLT_POINTER_MODE_ALPHA_DEVICE_VECTOR_BETA_HOST && beta);
}

std::vector<std::byte> Driver::content() {
  std::vector<std::byte> content(1 + random_() % 100);
  for (std::byte& one : content) one = static_cast<std::byte>(random_());
  return content;
}

void Driver::saw(const char* call, cublasStatus_t status) {
  seen_.append("\n").append(call).append(" ").append(std::to_string(status));
}

void Driver::saw(const void* begin, std::size_t bytes) {
  char text[4];
  for (std::size_t index = 0; index < bytes; ++index) {
    std::snprintf(text, sizeof text, " %02x",
                  static_cast<unsigned>(static_cast<const unsigned char*>(begin)[index]));
    seen_ += text;
  }
}

void Driver::begin() {
  find<decltype(cublasCreate_v2)>("cublasCreate_v2")(&handle_);
  on_device_ = random_() % 2 == 1;
  find<decltype(cublasSetPointerMode_v2)>("cublasSetPointerMode_v2")(
      handle_, on_device_ ? CUBLAS_POINTER_MODE_DEVICE : CUBLAS_POINTER_MODE_HOST);
  find<decltype(cublasLtMatmulDescCreate)>("cublasLtMatmulDescCreate")(
      &description_, draw<cublasComputeType_t>(), draw<cudaDataType_t>());
  auto* const set = find<decltype(cublasLtMatmulDescSetAttribute)>("cublasLtMatmulDescSetAttribute");
  if (random_() % 2 == 0) {
    const auto scale = draw<cudaDataType_t>();
    set(description_, CUBLASLT_MATMUL_DESC_SCALE_TYPE, &scale, sizeof scale);
  }
  mode_ = pick<cublasLtPointerMode_t>({CUBLASLT_POINTER_MODE_HOST, CUBLASLT_POINTER_MODE_DEVICE,
                                       CUBLASLT_POINTER_MODE_ALPHA_DEVICE_VECTOR_BETA_HOST});
  set(description_, CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode_, sizeof mode_);
  layouts_ = {nullptr};
  for (int which = 0; which < 3; ++which) {
    cublasLtMatrixLayout_t layout = nullptr;
    find<decltype(cublasLtMatrixLayoutCreate)>("cublasLtMatrixLayoutCreate")(
        &layout, draw<cudaDataType_t>(), draw<uint64_t>(), draw<uint64_t>(), draw<int64_t>());
    layouts_.push_back(layout);
  }
  find<decltype(cublasLtMatmulPreferenceCreate)>("cublasLtMatmulPreferenceCreate")(&preference_);
  cublasLtMatmulHeuristicResult_t results[8];
  int found = -1;
  const auto status = find<decltype(cublasLtMatmulAlgoGetHeuristic)>("cublasLtMatmulAlgoGetHeuristic")(
      light(), description_, layout(), layout(), layout(), layout(), preference_,
      static_cast<int>(random_() % 8), results, &found);
  saw("cublasLtMatmulAlgoGetHeuristic", status);
  saw(&found, sizeof found);
  if (found > 0) saw(results, sizeof results[0] * static_cast<std::size_t>(found));
}

void Driver::end() {
  find<decltype(cublasLtMatmulPreferenceDestroy)>("cublasLtMatmulPreferenceDestroy")(preference_);
  for (const auto layout : layouts_)
    if (layout) find<decltype(cublasLtMatrixLayoutDestroy)>("cublasLtMatrixLayoutDestroy")(layout);
  find<decltype(cublasLtMatmulDescDestroy)>("cublasLtMatmulDescDestroy")(description_);
  saw("cublasDestroy_v2", find<decltype(cublasDestroy_v2)>("cublasDestroy_v2")(handle_));
}

void Driver::run() {
  begin();
  std::vector<Call> order = calls();
  std::shuffle(order.begin(), order.end(), random_);
  for (const Call call : order) call(*this);
  end();
}

}  // namespace driver
