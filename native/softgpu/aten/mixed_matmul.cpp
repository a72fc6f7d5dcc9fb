// Products of half precision tensors with a result in single precision, which cuBLAS has and the CPU has not.
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>

#include "softgpu/aten/special.h"

namespace softgpu::aten {
namespace {

at::Tensor mm(const at::Tensor& self, const at::Tensor& other, at::ScalarType type) {
  return at::mm(self.to(type), other.to(type));
}

at::Tensor bmm(const at::Tensor& self, const at::Tensor& other, at::ScalarType type) {
  return at::bmm(self.to(type), other.to(type));
}

at::Tensor addmm(const at::Tensor& self, const at::Tensor& first, const at::Tensor& second,
                 at::ScalarType type, const at::Scalar& beta, const at::Scalar& alpha) {
  return at::addmm(self.to(type), first.to(type), second.to(type), beta, alpha);
}

at::Tensor baddbmm(const at::Tensor& self, const at::Tensor& first, const at::Tensor& second,
                   at::ScalarType type, const at::Scalar& beta, const at::Scalar& alpha) {
  return at::baddbmm(self.to(type), first.to(type), second.to(type), beta, alpha);
}

}  // namespace

void register_mixed_matmul(SpecialKernels& kernels) {
  kernels.implement("aten::mm.dtype", TORCH_FN(mm));
  kernels.implement("aten::bmm.dtype", TORCH_FN(bmm));
  kernels.implement("aten::addmm.dtype", TORCH_FN(addmm));
  kernels.implement("aten::baddbmm.dtype", TORCH_FN(baddbmm));
}

}  // namespace softgpu::aten
