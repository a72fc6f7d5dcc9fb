// Where DistributedDataParallel adds up gradients: its buckets, which no tensor of the program shows. Each
// backward pass that adds any up writes them before it reads them, so between two of them they hold nothing.
#include <pybind11/detail/common.h>
#include <torch/version.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/reducer.hpp>

namespace {

struct Buckets : c10d::Reducer {
  static const std::vector<Bucket>& of(const c10d::Reducer& reducer) { return reducer.*(&Buckets::buckets_); }
  // Then they are the gradients themselves.
  static bool are_gradients(const c10d::Reducer& reducer) {
    return reducer.*(&Buckets::gradient_as_bucket_view_);
  }
};

// What pybind11 has put behind an object of Python's.
const c10d::Reducer* reducer_of(PyObject* object) {
  const auto* const instance = reinterpret_cast<const pybind11::detail::instance*>(object);
  return static_cast<const c10d::Reducer*>(
      instance->simple_layout ? instance->simple_value_holder[0] : instance->nonsimple.values_and_holders[0]);
}

}  // namespace

// Of which torch the classes are that this library knows.
extern "C" __attribute__((visibility("default"))) const char* jitckpt_torch_version(void) {
  return TORCH_VERSION;
}

// Writes address and bytes of each bucket on a device, as many as there is room for; returns how many there
// are. reducer: a torch._C._distributed_c10d.Reducer.
extern "C" __attribute__((visibility("default"))) int64_t jitckpt_torch_buckets(PyObject* reducer,
                                                                                uint64_t (*extents)[2],
                                                                                int64_t room) {
  const c10d::Reducer* const found = reducer_of(reducer);
  if (!found || Buckets::are_gradients(*found)) return 0;
  int64_t count = 0;
  for (const auto& bucket : Buckets::of(*found)) {
    const at::Tensor& sums = bucket.gradients;
    if (bucket.expect_sparse_gradient || !sums.defined() || !sums.is_cuda() || !sums.is_contiguous())
      continue;
    if (count < room) {
      extents[count][0] = reinterpret_cast<uint64_t>(sums.const_data_ptr());
      extents[count][1] = sums.nbytes();
    }
    ++count;
  }
  return count;
}
