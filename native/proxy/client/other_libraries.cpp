// Libraries that have a CUDA runtime inside would open the device in this process, and find none of its
// memory there. What torch calls of each before all else is refused, so that a program hears of it in its
// first step.
#include <cstdint>

#include "proxy/client/errors.h"

namespace {

using jitckpt::proxy::client::name_refused;

constexpr const char* elsewhere = "compute that on the CPU, or train without the proxy";

// In the words of each library: "not supported".
constexpr int cudnn_not_supported = 3000, cusparse_not_supported = 10, cusolver_not_supported = 9,
              cufft_not_supported = 16;

int refuse(const char* library, const char* function, const char* advice, int result) {
  name_refused(function,
               std::string("the device proxy carries no ") + library + " (" + function + "): " + advice);
  return result;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
int cudnnCreate(void*);
int cusparseCreate(void*);
int cusparseLtInit(void*);
int cusolverDnCreate(void*);
int cufftCreate(void*);

int cudnnCreate(void*) {
  return refuse(
      "cuDNN", "cudnnCreate",
      "torch.backends.cudnn.enabled = False has torch use kernels of its own; or train without the proxy",
      cudnn_not_supported);
}
int cusparseCreate(void*) { return refuse("cuSPARSE", "cusparseCreate", elsewhere, cusparse_not_supported); }
int cusparseLtInit(void*) {
  return refuse("cuSPARSELt", "cusparseLtInit", elsewhere, cusparse_not_supported);
}
int cusolverDnCreate(void*) {
  return refuse("cuSOLVER", "cusolverDnCreate", elsewhere, cusolver_not_supported);
}
int cufftCreate(void*) { return refuse("cuFFT", "cufftCreate", elsewhere, cufft_not_supported); }
}
#pragma GCC visibility pop
