// The arithmetic of reductions.
//
// One order for all, but for what reduction_order.h says: ((r0 op r1) op r2) op ..., element by element in
// the order of the ranks, with one rounding to the element's type per operation (float16, bfloat16 and float8
// are computed in float and rounded each time; integers wrap). An average is that sum, divided by the number
// of ranks (integers towards zero) with one more rounding. A pre-multiplied sum rounds each rank's product
// before it adds. So a result is the same bit for bit in every run and on every rank, and equals t0 + t1 + t2
// with torch on the CPU. Where one of two values is NaN, max and min give the other, as NCCL does.
#pragma once
#include <nccl.h>

#include <cstddef>

namespace softgpu::nccl {

// accumulator[i] = accumulator[i] op right[i]; sum, prod, max, min (the others are sums here). The two may
// not overlap.
void combine(ncclDataType_t type, ncclRedOp_t operation, void* accumulator, const void* right, size_t count);

// values[i] = values[i] / ranks
void divide(ncclDataType_t type, void* values, int ranks, size_t count);

// result[i] = source[i] * *scalar; they may not overlap.
void multiply(ncclDataType_t type, void* result, const void* source, const void* scalar, size_t count);

}  // namespace softgpu::nccl
