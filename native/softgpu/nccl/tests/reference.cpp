#include "softgpu/nccl/tests/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

Format::Format(int exponent_bits, int mantissa_bits, bool has_infinity, bool saturates)
    : exponent_bits_(exponent_bits), mantissa_bits_(mantissa_bits), saturates_(saturates) {
  sign_ = 1u << (exponent_bits + mantissa_bits);
  const uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  nan_from_ = has_infinity ? infinity : sign_ - 2;  // NaNs are above
  largest_ = has_infinity ? infinity - 1 : sign_ - 2;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  for (uint32_t bits = 0; bits <= largest_; ++bits) {
    const int exponent = static_cast<int>(bits >> mantissa_bits);
    const double mantissa = bits & ((1u << mantissa_bits) - 1);
    const double scale = std::ldexp(1.0, -mantissa_bits);
    magnitudes_.push_back(exponent == 0 ? std::ldexp(mantissa * scale, 1 - bias)
                                        : std::ldexp(1 + mantissa * scale, exponent - bias));
  }
}

double Format::decode(uint32_t bits) const {
  const uint32_t magnitude = bits & (sign_ - 1);
  double value = std::numeric_limits<double>::infinity();
  if (is_nan(bits)) value = std::numeric_limits<double>::quiet_NaN();
  if (magnitude <= largest_) value = magnitudes_[magnitude];
  return bits & sign_ ? -value : value;
}

uint32_t Format::encode(float value) const {
  if (std::isnan(value)) return sign_ - 1;
  const uint32_t sign = std::signbit(value) ? sign_ : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  const auto above = std::lower_bound(magnitudes_.begin(), magnitudes_.end(), magnitude);
  if (above == magnitudes_.end()) {
    const double step = magnitudes_[largest_] - magnitudes_[largest_ - 1];
    const bool rounds_down = magnitude < magnitudes_[largest_] + step / 2;
    return sign | (rounds_down || saturates_ ? largest_ : largest_ + 1);
  }
  const auto high = static_cast<uint32_t>(above - magnitudes_.begin());
  if (*above == magnitude) return sign | high;
  const double to_low = magnitude - magnitudes_[high - 1], to_high = *above - magnitude;
  if (to_low == to_high) return sign | (high % 2 == 0 ? high : high - 1);
  return sign | (to_low < to_high ? high - 1 : high);
}

const Format& format_of(ncclDataType_t type) {
  static const Format half(5, 10, true, false), bfloat(8, 7, true, false), e4m3(4, 3, false, true),
      e5m2(5, 2, true, true);
  switch (type) {
    case ncclFloat16:
      return half;
    case ncclBfloat16:
      return bfloat;
    case ncclFloat8e4m3:
      return e4m3;
    default:
      return e5m2;
  }
}

size_t bytes_per_element(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 4;
  }
}

namespace {

template <class T>
T get(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
template <class T>
void put(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

template <class T>
T apply(ncclRedOp_t operation, T left, T right) {
  if constexpr (std::is_integral_v<T>) {
    const auto wide_left = static_cast<__uint128_t>(left), wide_right = static_cast<__uint128_t>(right);
    if (operation == ncclSum || operation == ncclAvg) return static_cast<T>(wide_left + wide_right);
    if (operation == ncclProd) return static_cast<T>(wide_left * wide_right);
  } else {
    if (operation == ncclSum || operation == ncclAvg) return left + right;
    if (operation == ncclProd) return left * right;
    if (std::isnan(left)) return right;
    if (std::isnan(right)) return left;
  }
  if (operation == ncclMax) return left > right ? left : right;
  return left < right ? left : right;
}

// Calls work(T(), load, store) with what elements of the type are computed in.
template <class Work>
void with_type(ncclDataType_t type, Work work) {
  const auto plain = [&](auto zero) {
    using T = decltype(zero);
    work(zero, get<T>, put<T>);
  };
  switch (type) {
    case ncclInt8:
      return plain(int8_t());
    case ncclUint8:
      return plain(uint8_t());
    case ncclInt32:
      return plain(int32_t());
    case ncclUint32:
      return plain(uint32_t());
    case ncclInt64:
      return plain(int64_t());
    case ncclUint64:
      return plain(uint64_t());
    case ncclFloat32:
      return plain(float());
    case ncclFloat64:
      return plain(double());
    default:
      break;
  }
  const Format& format = format_of(type);
  const bool wide = bytes_per_element(type) == 2;
  work(
      float(),
      [&](const std::byte* at) {
        return static_cast<float>(format.decode(wide ? get<uint16_t>(at) : get<uint8_t>(at)));
      },
      [&](std::byte* at, float value) {
        const uint32_t bits = format.encode(value);
        wide ? put(at, static_cast<uint16_t>(bits)) : put(at, static_cast<uint8_t>(bits));
      });
}

}  // namespace

Bytes make_input(ncclDataType_t type, size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  const size_t size = bytes_per_element(type);
  Bytes data(count * size);
  with_type(type, [&](auto zero, auto, auto store) {
    using T = decltype(zero);
    for (size_t i = 0; i < count; ++i) {
      if constexpr (std::is_integral_v<T>) {
        store(&data[i * size], static_cast<T>(random()));
      } else {
        store(&data[i * size], static_cast<T>(std::ldexp(static_cast<double>(random() >> 11), -50) - 4));
      }
    }
  });
  return data;
}

Bytes reduce_in_order(ncclDataType_t type, ncclRedOp_t operation, const std::vector<Bytes>& inputs) {
  Bytes result = inputs[0];
  const size_t size = bytes_per_element(type);
  with_type(type, [&](auto zero, auto load, auto store) {
    using T = decltype(zero);
    for (size_t at = 0; at < result.size(); at += size) {
      for (size_t rank = 1; rank < inputs.size(); ++rank) {
        store(&result[at], apply<T>(operation, load(&result[at]), load(&inputs[rank][at])));
      }
      if (operation != ncclAvg) continue;
      if constexpr (std::is_integral_v<T>) {
        const auto sum = static_cast<__int128_t>(load(&result[at]));
        store(&result[at], static_cast<T>(sum / static_cast<__int128_t>(inputs.size())));
      } else {
        store(&result[at], load(&result[at]) / static_cast<T>(inputs.size()));
      }
    }
  });
  return result;
}

Bytes multiplied(ncclDataType_t type, const Bytes& input, const std::byte* scalar) {
  Bytes result = input;
  const size_t size = bytes_per_element(type);
  with_type(type, [&](auto zero, auto load, auto store) {
    for (size_t at = 0; at < result.size(); at += size) {
      store(&result[at], apply<decltype(zero)>(ncclProd, load(&input[at]), load(scalar)));
    }
  });
  return result;
}
