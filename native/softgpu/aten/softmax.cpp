// CUDA's softmax can take half precision and return single; the CPU's cannot, so the conversion is an
// operator of its own here.
#include "softgpu/aten/call.h"
#include "softgpu/aten/special.h"

namespace softgpu::aten {
namespace {

// (self, dim, half_to_float, ...)
template <size_t argument_count>
void convert_first(c10::Stack* stack) {
  c10::IValue* arguments = &*(stack->end() - argument_count);
  if (!arguments[2].toBool()) return;
  arguments[0] = arguments[0].toTensor().to(at::kFloat);
  arguments[2] = false;
}

at::Tensor backward(Operator& op, const at::Tensor& gradient, const at::Tensor& output, int64_t dim,
                    at::ScalarType input_type) {
  return call_operator(op, gradient, output, dim, gradient.scalar_type()).to(input_type);
}

at::Tensor softmax_backward(const at::Tensor& gradient, const at::Tensor& output, int64_t dim,
                            at::ScalarType input_type) {
  static Operator& op = *find_operator("aten::_softmax_backward_data");
  return backward(op, gradient, output, dim, input_type);
}

at::Tensor log_softmax_backward(const at::Tensor& gradient, const at::Tensor& output, int64_t dim,
                                at::ScalarType input_type) {
  static Operator& op = *find_operator("aten::_log_softmax_backward_data");
  return backward(op, gradient, output, dim, input_type);
}

void prepare(const char* name, Prepare function) {
  if (Operator* op = find_operator(name)) op->prepare = function;
}

}  // namespace

void register_softmax(SpecialKernels& kernels) {
  prepare("aten::_softmax", convert_first<3>);
  prepare("aten::_softmax.out", convert_first<4>);
  prepare("aten::_log_softmax", convert_first<3>);
  prepare("aten::_log_softmax.out", convert_first<4>);
  kernels.implement("aten::_softmax_backward_data", TORCH_FN(softmax_backward));
  kernels.implement("aten::_log_softmax_backward_data", TORCH_FN(log_softmax_backward));
}

}  // namespace softgpu::aten
