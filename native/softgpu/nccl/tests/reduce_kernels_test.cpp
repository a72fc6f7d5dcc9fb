// The arithmetic of one rank, against the reference.
#include "softgpu/nccl/reduce_kernels.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "softgpu/nccl/narrow_floats.h"
#include "softgpu/nccl/operation.h"
#include "softgpu/nccl/tests/reference.h"

namespace softgpu::nccl {
namespace {

template <class Narrow>
void expect_every_number_converts(ncclDataType_t type) {
  const Format& format = format_of(type);
  for (uint32_t bits = 0; bits < 2 * format.sign(); ++bits) {
    const Narrow number{static_cast<decltype(Narrow::bits)>(bits)};
    const float value = widen(number);
    if (format.is_nan(bits)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_TRUE(format.is_nan(narrow<Narrow>(value).bits)) << bits;
      continue;
    }
    ASSERT_EQ(std::bit_cast<uint32_t>(value),
              std::bit_cast<uint32_t>(static_cast<float>(format.decode(bits))))
        << bits;
    ASSERT_EQ(narrow<Narrow>(value).bits, format.encode(value))
        << bits;  // an infinity may become the largest number
  }
}

template <class Narrow>
void expect_every_float_rounds(ncclDataType_t type) {
  const Format& format = format_of(type);
  std::mt19937 random(7);
  const auto check = [&](uint32_t bits) {
    const float value = std::bit_cast<float>(bits);
    const uint32_t rounded = narrow<Narrow>(value).bits;
    if (std::isnan(value)) {
      ASSERT_TRUE(format.is_nan(rounded)) << value;
    } else {
      ASSERT_EQ(rounded, format.encode(value)) << value;
    }
  };
  for (int i = 0; i < 300'000; ++i) check(static_cast<uint32_t>(random()));
  // Ties, and what is next to them, around every number of the format.
  for (uint32_t bits = 0; bits + 1 < format.sign() && !format.is_nan(bits); ++bits) {
    const double middle = (format.decode(bits) + format.decode(bits + 1)) / 2;
    if (!std::isfinite(middle)) continue;
    const uint32_t tie = std::bit_cast<uint32_t>(static_cast<float>(middle));
    for (uint32_t near = tie - (tie != 0); near <= tie + 1; ++near) {
      check(near);
      check(near | 0x80000000u);
    }
  }
}

TEST(NarrowFloats, EveryHalfConverts) { expect_every_number_converts<Half>(ncclFloat16); }
TEST(NarrowFloats, EveryBFloat16Converts) { expect_every_number_converts<BFloat16>(ncclBfloat16); }
TEST(NarrowFloats, EveryFloat8E4M3Converts) { expect_every_number_converts<Float8E4M3>(ncclFloat8e4m3); }
TEST(NarrowFloats, EveryFloat8E5M2Converts) { expect_every_number_converts<Float8E5M2>(ncclFloat8e5m2); }
TEST(NarrowFloats, FloatsRoundToHalf) { expect_every_float_rounds<Half>(ncclFloat16); }
TEST(NarrowFloats, FloatsRoundToBFloat16) { expect_every_float_rounds<BFloat16>(ncclBfloat16); }
TEST(NarrowFloats, FloatsRoundToFloat8E4M3) { expect_every_float_rounds<Float8E4M3>(ncclFloat8e4m3); }
TEST(NarrowFloats, FloatsRoundToFloat8E5M2) { expect_every_float_rounds<Float8E5M2>(ncclFloat8e5m2); }

class ReduceKernels : public testing::TestWithParam<int> {};

TEST_P(ReduceKernels, EqualTheReference) {
  const auto type = static_cast<ncclDataType_t>(GetParam());
  constexpr size_t count = 1003;
  ASSERT_EQ(size_of(type), bytes_per_element(type));
  for (const ncclRedOp_t operation : {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg}) {
    for (const int ranks : {1, 2, 3, 8}) {
      std::vector<Bytes> inputs;
      for (int rank = 0; rank < ranks; ++rank) inputs.push_back(make_input(type, count, 100 + rank));
      Bytes result = inputs[0];
      for (int rank = 1; rank < ranks; ++rank)
        combine(type, operation, result.data(), inputs[rank].data(), count);
      if (operation == ncclAvg) divide(type, result.data(), ranks, count);
      EXPECT_EQ(result, reduce_in_order(type, operation, inputs)) << operation << " of " << ranks;
    }
  }
  const Bytes input = make_input(type, count, 3), scalar = make_input(type, 1, 4);
  Bytes result(input.size());
  multiply(type, result.data(), input.data(), scalar.data(), count);
  EXPECT_EQ(result, multiplied(type, input, scalar.data()));
}

INSTANTIATE_TEST_SUITE_P(AllTypes, ReduceKernels, testing::Range(0, static_cast<int>(ncclNumTypes)),
                         [](const auto& info) { return name_of(static_cast<ncclDataType_t>(info.param)); });

TEST(ReduceKernels, MaximumAndMinimumPreferNumbersToNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ncclRedOp_t operation : {ncclMax, ncclMin}) {
    float accumulator[] = {nan, 1, nan};
    const float right[] = {2, nan, nan};
    combine(ncclFloat32, operation, accumulator, right, 3);
    EXPECT_EQ(accumulator[0], 2);
    EXPECT_EQ(accumulator[1], 1);
    EXPECT_TRUE(std::isnan(accumulator[2]));
  }
}

TEST(ReduceKernels, AveragesOverMoreRanksThanAnElementCounts) {
  int8_t value = 127;
  divide(ncclInt8, &value, 200, 1);
  EXPECT_EQ(value, 0);
}

}  // namespace
}  // namespace softgpu::nccl
