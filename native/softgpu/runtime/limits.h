// The figures that softgpu gives of itself: those of a GPU of compute capability 9.0, so that programs take
// the paths they take on a modern GPU.
#pragma once
#include <cstddef>

namespace softgpu::limits {

constexpr int compute_major = 9, compute_minor = 0;
constexpr int warp_threads = 32;
constexpr int multiprocessors = 132;
constexpr std::size_t threads_per_block = 1024;
constexpr std::size_t threads_per_multiprocessor = 2048;
constexpr std::size_t blocks_per_multiprocessor = 32;
constexpr unsigned block_x = 1024, block_y = 1024, block_z = 64;
constexpr unsigned grid_x = 2147483647, grid_yz = 65535;
constexpr std::size_t shared_bytes_per_block = 48 << 10;
constexpr std::size_t shared_bytes_opt_in = 227 << 10;
constexpr std::size_t shared_bytes_per_multiprocessor = 228 << 10;
constexpr std::size_t shared_bytes_reserved = 1 << 10;
constexpr int registers = 65536;
constexpr std::size_t constant_bytes = 64 << 10;
constexpr std::size_t l2_bytes = 50 << 20;
constexpr int memory_bus_bits = 5120;
constexpr int texture_alignment = 512, texture_pitch_alignment = 32;
constexpr int copy_engines = 3;

}  // namespace softgpu::limits
