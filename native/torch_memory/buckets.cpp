#include "torch_memory/buckets.h"

#include <pybind11/detail/common.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdint>
#include <torch/csrc/distributed/c10d/reducer.hpp>

namespace jitckpt::torch_memory {
namespace {

struct Buckets : c10d::Reducer {
  static const std::vector<Bucket>& of(const c10d::Reducer& reducer) { return reducer.*(&Buckets::buckets_); }
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

void append_buckets(PyObject* reducer, std::vector<jitckpt_proxy_place>& places) {
  const c10d::Reducer* const found = reducer_of(reducer);
  if (!found || Buckets::are_gradients(*found)) return;
  for (const auto& bucket : Buckets::of(*found)) {
    const at::Tensor& sums = bucket.gradients;
    if (bucket.expect_sparse_gradient || !sums.defined() || !sums.is_cuda() || !sums.is_contiguous())
      continue;
    places.push_back({reinterpret_cast<uint64_t>(sums.const_data_ptr()), sums.nbytes()});
  }
}

}  // namespace jitckpt::torch_memory

// Of which torch the classes are that this library knows.
extern "C" __attribute__((visibility("default"))) const char* jitckpt_torch_version(void) {
  return TORCH_VERSION;
}

// Writes address and bytes of each bucket on a device, as many as there is room for; returns how many there
// are.
extern "C" __attribute__((visibility("default"))) int64_t jitckpt_torch_buckets(PyObject* reducer,
                                                                                jitckpt_proxy_place* places,
                                                                                int64_t room) {
  std::vector<jitckpt_proxy_place> found;
  jitckpt::torch_memory::append_buckets(reducer, found);
  std::copy_n(found.begin(), std::min<std::size_t>(found.size(), room), places);
  return static_cast<int64_t>(found.size());
}
