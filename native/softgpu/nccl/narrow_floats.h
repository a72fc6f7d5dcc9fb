// The floating-point types that C++ does not have: to float and back, to the nearest, ties to even. Without
// branches, so that loops over them vectorise on any processor.
#pragma once
#include <bit>
#include <cstdint>

namespace softgpu::nccl {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Float8E4M3 {  // no infinity; NaN is all ones
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

// A magnitude (without the sign) in a format with so many bits of mantissa and this exponent bias, as float.
// Multiplying moves the bias, and makes numbers of the format's subnormals too.
template <int mantissa, int bias>
uint32_t widen_magnitude(uint32_t magnitude) {
  constexpr float factor = std::bit_cast<float>((254u - bias) << 23);  // 2 to the 127 - bias
  return std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << (23 - mantissa)) * factor);
}

// The other way, for a magnitude that the format can represent.
template <int mantissa, int bias>
uint32_t round_magnitude(uint32_t magnitude) {
  constexpr int shift = 23 - mantissa;
  const uint32_t half_less = (1u << (shift - 1)) - 1;
  const uint32_t normal =
      (magnitude - ((127u - bias) << 23) + half_less + ((magnitude >> shift) & 1)) >> shift;
  // The floating-point unit rounds: the last bit of this number is worth as much as the format's smallest.
  constexpr uint32_t ruler = (127u + 23 + 1 - bias - mantissa) << 23;
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + std::bit_cast<float>(ruler)) - ruler;
  return magnitude < (128u - bias) << 23 ? subnormal : normal;
}

inline float widen(Half value) {
  const uint32_t magnitude = value.bits & 0x7fffu;
  const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;  // infinity, NaN
  return std::bit_cast<float>((value.bits & 0x8000u) << 16 | special | widen_magnitude<10, 15>(magnitude));
}
inline float widen(BFloat16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }
inline float widen(Float8E4M3 value) {
  const uint32_t magnitude = value.bits & 0x7fu;
  const uint32_t special = magnitude == 0x7fu ? 0x7fc00000u : 0u;
  return std::bit_cast<float>((value.bits & 0x80u) << 24 | special | widen_magnitude<3, 7>(magnitude));
}
inline float widen(Float8E5M2 value) { return widen(Half{static_cast<uint16_t>(value.bits << 8)}); }

template <class Narrow>
Narrow narrow(float value);

template <>
inline Half narrow<Half>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t beyond = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t result = magnitude >= 0x47800000u ? beyond : round_magnitude<10, 15>(magnitude);
  return {static_cast<uint16_t>(result | (bits >> 16 & 0x8000u))};
}

template <>
inline BFloat16 narrow<BFloat16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
}

// What is too large for 8 bits becomes the largest number, as NCCL's reductions do on a device.
template <>
inline Float8E4M3 narrow<Float8E4M3>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t beyond = magnitude > 0x7f800000u ? 0x7fu : 0x7eu;
  const uint32_t result = magnitude > 0x43e00000u ? beyond : round_magnitude<3, 7>(magnitude);  // 448
  return {static_cast<uint8_t>(result | (bits >> 24 & 0x80u))};
}

template <>
inline Float8E5M2 narrow<Float8E5M2>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t beyond = magnitude > 0x7f800000u ? 0x7fu : 0x7bu;
  const uint32_t result = magnitude > 0x47600000u ? beyond : round_magnitude<2, 15>(magnitude);  // 57344
  return {static_cast<uint8_t>(result | (bits >> 24 & 0x80u))};
}

}  // namespace softgpu::nccl
