// What the headers declare of the libraries whose calls are in calls.toml.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

// Of narrow floating-point numbers cuBLAS has pointers only (see cmake/nvidia_headers.cmake).
struct __half;
struct __nv_bfloat16;
#include <cublasLt.h>
#include <cublas_v2.h>

namespace jitckpt {

enum class Library : unsigned char { cudart, nccl, cublas, cuda };

}  // namespace jitckpt
