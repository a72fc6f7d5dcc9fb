// What NCCL's reductions have to give, computed the slow and obvious way, one element at a time.
#pragma once
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <vector>

// A floating-point format of 8 or 16 bits, as the table of all its numbers.
class Format {
 public:
  Format(int exponent_bits, int mantissa_bits, bool has_infinity, bool saturates);
  double decode(uint32_t bits) const;  // NaN and infinities too
  uint32_t encode(float value) const;  // NaN in whatever form: compare with is_nan
  bool is_nan(uint32_t bits) const { return (bits & (sign_ - 1)) > nan_from_; }
  uint32_t sign() const { return sign_; }

 private:
  int exponent_bits_, mantissa_bits_;
  bool saturates_;
  uint32_t sign_, nan_from_, largest_;
  std::vector<double> magnitudes_;  // by bits, finite
};
const Format& format_of(ncclDataType_t type);  // float16, bfloat16, float8

using Bytes = std::vector<std::byte>;

// `count` elements that depend on nothing but the arguments; the floating-point ones are moderate numbers.
Bytes make_input(ncclDataType_t type, size_t count, uint64_t seed);

// ((r0 op r1) op r2) ..., ncclAvg divided by the number of inputs. All inputs have `count` elements.
Bytes reduce_in_order(ncclDataType_t type, ncclRedOp_t operation, const std::vector<Bytes>& inputs);

// Each element times the scalar, rounded.
Bytes multiplied(ncclDataType_t type, const Bytes& input, const std::byte* scalar);

size_t bytes_per_element(ncclDataType_t type);
