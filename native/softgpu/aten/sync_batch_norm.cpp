// The pieces of SyncBatchNorm, which torch has on CUDA only: statistics of one rank, of all ranks, and what
// is made of them. A statistic has one value a channel (dimension 1 of the input).
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/var_mean.h>

#include "softgpu/aten/special.h"

namespace softgpu::aten {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

bool given(const OptionalTensor& tensor) { return tensor && tensor->defined(); }

// Statistics are kept in at least single precision.
at::Tensor precise(const at::Tensor& tensor) {
  return at::isReducedFloatingType(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
}

std::vector<int64_t> all_but_channels(const at::Tensor& input) {
  std::vector<int64_t> dimensions = {0};
  for (int64_t dimension = 2; dimension < input.dim(); ++dimension) dimensions.push_back(dimension);
  return dimensions;
}

// A statistic in a shape that broadcasts against the input.
at::Tensor per_channel(const at::Tensor& statistic, const at::Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = -1;
  return statistic.reshape(shape);
}

// Returns mean and inverse deviation.
std::tuple<at::Tensor, at::Tensor> stats(const at::Tensor& input, double epsilon) {
  auto [variance, mean] = at::var_mean(precise(input), all_but_channels(input), /*unbiased=*/false);
  return {mean, at::rsqrt(variance.add(epsilon))};
}

// mean, deviation: (ranks, channels); counts: how many values each rank has seen. Returns mean and inverse
// deviation of all ranks together, and moves the running statistics on.
std::tuple<at::Tensor, at::Tensor> gather_stats(const at::Tensor& /*input*/, const at::Tensor& means,
                                                const at::Tensor& deviations,
                                                const OptionalTensor& running_mean,
                                                const OptionalTensor& running_var, double momentum,
                                                double epsilon, const at::Tensor& counts) {
  const at::Tensor weights = counts.to(means.scalar_type()).reshape({-1, 1});
  const at::Tensor total = weights.sum();
  const at::Tensor mean = means.mul(weights).sum(0).div(total);
  const at::Tensor variances = deviations.pow(-2).sub(epsilon);
  const at::Tensor squares = variances.add(means.sub(mean).pow(2)).mul(weights).sum(0);
  if (given(running_mean))
    running_mean->mul_(1 - momentum).add_(mean.to(running_mean->scalar_type()), momentum);
  if (given(running_var)) {
    const at::Tensor unbiased = squares.div(total.sub(1));
    running_var->mul_(1 - momentum).add_(unbiased.to(running_var->scalar_type()), momentum);
  }
  return {mean, at::rsqrt(squares.div(total).add(epsilon))};
}

at::Tensor normalize(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                     const at::Tensor& mean, const at::Tensor& deviation, double /*epsilon*/) {
  at::Tensor result = precise(input).sub(per_channel(mean, input)).mul(per_channel(deviation, input));
  if (given(weight)) result = result.mul(per_channel(*weight, input));
  if (given(bias)) result = result.add(per_channel(*bias, input));
  return result.to(input.scalar_type());
}

// Returns the sums of dy and of dy * (x - mean), and the gradients of weight and bias.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward_sums(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& deviation,
    const OptionalTensor& weight, bool input_needed, bool weight_needed, bool bias_needed) {
  const auto dimensions = all_but_channels(input);
  const at::Tensor sum = precise(gradient).sum(dimensions);
  const at::Tensor centred =
      precise(gradient).mul(precise(input).sub(per_channel(mean, input))).sum(dimensions);
  const at::ScalarType type = given(weight) ? weight->scalar_type() : sum.scalar_type();
  return {input_needed ? sum : at::Tensor(), input_needed ? centred : at::Tensor(),
          weight_needed ? centred.mul(deviation).to(type) : at::Tensor(),
          bias_needed ? sum.to(type) : at::Tensor()};
}

at::Tensor backward_input(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& mean,
                          const at::Tensor& deviation, const OptionalTensor& weight, const at::Tensor& sum,
                          const at::Tensor& centred, const at::Tensor& counts) {
  const at::Tensor total = counts.sum().to(sum.scalar_type());
  const at::Tensor slope = deviation.pow(2).mul(centred).div(total);
  at::Tensor result = precise(gradient).sub(per_channel(sum.div(total), input));
  result = result.sub(precise(input).sub(per_channel(mean, input)).mul(per_channel(slope, input)));
  result = result.mul(per_channel(given(weight) ? deviation.mul(*weight) : deviation, input));
  return result.to(input.scalar_type());
}

}  // namespace

void register_sync_batch_norm(SpecialKernels& kernels) {
  kernels.implement("aten::batch_norm_stats", TORCH_FN(stats));
  kernels.implement("aten::batch_norm_gather_stats_with_counts", TORCH_FN(gather_stats));
  kernels.implement("aten::batch_norm_elemt", TORCH_FN(normalize));
  kernels.implement("aten::batch_norm_backward_reduce", TORCH_FN(backward_sums));
  kernels.implement("aten::batch_norm_backward_elemt", TORCH_FN(backward_input));
}

}  // namespace softgpu::aten
