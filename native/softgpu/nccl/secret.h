// The secret in a unique id, by which the processes of one communicator know each other.
//
// A connection is only taken from who signs its greeting with the secret, which is never sent itself. That
// keeps strangers out. It does not hide or protect what is sent afterwards: like NCCL's, this network has to
// be one whose machines are trusted.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace softgpu::nccl {

using Key = std::array<uint8_t, 16>;
using Tag = std::array<uint8_t, 16>;

Key random_key();

// SipHash-2-4 with a result of 128 bits (Aumasson and Bernstein, 2012): without the key nobody can make the
// tag of another message.
Tag sign(const Key& key, const void* message, size_t bytes);

// In a time that tells nothing of where they differ.
bool are_equal(const Tag& left, const Tag& right);

// Two digits a byte, small letters.
std::string to_hex(const std::array<uint8_t, 16>& bytes);
bool from_hex(const std::string& digits, std::array<uint8_t, 16>& bytes);  // false: these are none

}  // namespace softgpu::nccl
