#include "softgpu/nccl/secret.h"

#include <sys/random.h>

#include <bit>
#include <cerrno>
#include <cstring>

#include "softgpu/nccl/failure.h"

namespace softgpu::nccl {
namespace {

static_assert(std::endian::native == std::endian::little);

uint64_t load(const uint8_t* bytes, size_t count = 8) {
  uint64_t word = 0;
  if (count != 0) std::memcpy(&word, bytes, count);
  return word;
}

struct State {
  uint64_t a, b, c, d;

  void mix(int rounds) {
    while (rounds-- > 0) {
      a += b, b = std::rotl(b, 13) ^ a, a = std::rotl(a, 32);
      c += d, d = std::rotl(d, 16) ^ c;
      a += d, d = std::rotl(d, 21) ^ a;
      c += b, b = std::rotl(b, 17) ^ c, c = std::rotl(c, 32);
    }
  }
  void take(uint64_t word) {
    d ^= word;
    mix(2);
    a ^= word;
  }
  uint64_t result() const { return a ^ b ^ c ^ d; }
};

}  // namespace

Key random_key() {
  Key key;
  if (getrandom(key.data(), key.size(), 0) != static_cast<ssize_t>(key.size())) {
    throw NcclFailure(ncclSystemError, "No random secret for a unique id (getrandom: ", std::strerror(errno),
                      ").");
  }
  return key;
}

Tag sign(const Key& key, const void* message, size_t bytes) {
  const auto* at = static_cast<const uint8_t*>(message);
  const uint64_t first = load(key.data()), second = load(key.data() + 8);
  State state{first ^ 0x736f6d6570736575, second ^ 0x646f72616e646f6d ^ 0xee, first ^ 0x6c7967656e657261,
              second ^ 0x7465646279746573};
  size_t left = bytes;
  for (; left >= 8; left -= 8, at += 8) state.take(load(at));
  state.take(load(at, left) | uint64_t{bytes} << 56);
  state.c ^= 0xee;
  state.mix(4);
  const uint64_t low = state.result();
  state.b ^= 0xdd;
  state.mix(4);
  const uint64_t high = state.result();

  Tag tag;
  std::memcpy(tag.data(), &low, 8);
  std::memcpy(tag.data() + 8, &high, 8);
  return tag;
}

bool are_equal(const Tag& left, const Tag& right) {
  uint8_t difference = 0;
  for (size_t i = 0; i < left.size(); ++i) difference |= left[i] ^ right[i];
  return difference == 0;
}

std::string to_hex(const std::array<uint8_t, 16>& bytes) {
  std::string digits;
  for (const uint8_t byte : bytes) {
    digits += "0123456789abcdef"[byte >> 4];
    digits += "0123456789abcdef"[byte & 15];
  }
  return digits;
}

bool from_hex(const std::string& digits, std::array<uint8_t, 16>& bytes) {
  const auto value_of = [](char digit) {
    if (digit >= '0' && digit <= '9') return digit - '0';
    return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
  };
  if (digits.size() != 2 * bytes.size()) return false;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const int high = value_of(digits[2 * i]), low = value_of(digits[2 * i + 1]);
    if (high < 0 || low < 0) return false;
    bytes[i] = static_cast<uint8_t>(high << 4 | low);
  }
  return true;
}

}  // namespace softgpu::nccl
