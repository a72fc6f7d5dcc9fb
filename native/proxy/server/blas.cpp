// cuBLAS's calls that need thought.
#include <dlfcn.h>

#include <cstring>
#include <string>

#include "proxy/server/server.h"
#include "proxy/server/services.h"
#include "real_calls.h"

namespace jitckpt::proxy {

int32_t serve_make_blas(Request& request) {
  const auto arguments = request.arguments<wire::make_blas>();
  const auto* const path =
      static_cast<const char*>(request.content_after<wire::make_blas>(arguments.path_bytes));
  if (const std::string library(path, arguments.path_bytes); !library.empty()) {
    // Stays loaded: the next handle needs it too.
    if (!dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL))
      throw CallFailure(CUBLAS_STATUS_NOT_INITIALIZED,
                        "the device proxy's server can't load " + library + ": " + dlerror());
  }
  cublasHandle_t made = nullptr;
  const cublasStatus_t status = real::cublasCreate_v2(&made);
  if (status == CUBLAS_STATUS_SUCCESS) request.server.blas_handles.add(arguments.handle, made);
  return status;
}

int32_t serve_matmul_heuristic(Request& request) {
  const auto arguments = request.arguments<wire::matmul_heuristic>();
  Server& server = request.server;
  auto& answer = request.answer<wire::matmul_heuristic_answer>();
  if (arguments.requested < 0 || arguments.requested > static_cast<int>(wire::most_heuristics))
    throw CallFailure(CUBLAS_STATUS_INVALID_VALUE, "more algorithms are wanted than an answer can hold");
  cublasLtMatrixLayout_t layouts[4];
  for (int which = 0; which < 4; ++which)
    layouts[which] = server.matrix_layouts.find(arguments.layouts[which]);
  return real::cublasLtMatmulAlgoGetHeuristic(
      reinterpret_cast<cublasLtHandle_t>(server.blas_handles.find(arguments.handle)),
      server.matmul_descriptions.find(arguments.description), layouts[0], layouts[1], layouts[2], layouts[3],
      server.matmul_preferences.find(arguments.preference), arguments.requested, answer.results,
      &answer.found);
}

}  // namespace jitckpt::proxy
