// Which ranks are on one host, and can share memory.
#pragma once
#include <array>
#include <cstdint>

namespace softgpu::nccl {

// Alike for processes with the same host name, boot and network namespace, as with NCCL. The variable
// NCCL_HOSTID takes the place of all three.
using HostId = std::array<uint8_t, 16>;

HostId this_host();

}  // namespace softgpu::nccl
