// Finds out what an operator returns without its data: runs its CPU kernel on made-up tensors of the same
// shapes.
#pragma once
#include <memory>

#include "softgpu/aten/layout_cache.h"
#include "softgpu/aten/pack.h"

namespace softgpu::aten {

// The CPU kernel is the only one who knows its results' strides exactly, and whether it accepts the
// arguments. If it fails on made-up data, only the real data can tell why: the layout is then `synchronous`.
std::shared_ptr<const ResultLayout> rehearse(const Operator& op, const Packed& packed);

}  // namespace softgpu::aten
