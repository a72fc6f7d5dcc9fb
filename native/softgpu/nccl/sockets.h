// Sockets between processes: where they listen, and how they connect.
#pragma once
#include <sys/socket.h>

#include <atomic>
#include <cstddef>
#include <string>

#include "softgpu/nccl/file_descriptor.h"

namespace softgpu::nccl {

// How often those who wait look whether their communicator has been aborted.
constexpr int abort_poll_milliseconds = 50;

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// Such as 10.0.0.1:4242 or [fd00::1]:4242.
std::string to_text(const Address& address);
Address address_from(const std::string& text);  // throws a NcclFailure if this is none

// A name without a file, on this host only.
Address abstract_address(const std::string& name);

// An address of this host by which others reach it, with port 0. NCCL_SOCKET_IFNAME chooses among its
// interfaces, as with NCCL: a list of prefixes, after ^ those not to take, after = whole names. Without it:
// any but docker's, virbr's and the loopback if there is one. Interfaces that are down don't count.
Address own_address();

FileDescriptor listen_at(const Address& address);
Address address_of(const FileDescriptor& listener);

// These wait until it is done, and throw a NcclFailure: ncclRemoteError if the other side is not there or
// ends it, ncclInternalError once `aborted` is true.
FileDescriptor connect_to(const Address& address, const std::atomic<bool>& aborted);
void send_all(const FileDescriptor& socket, const void* data, size_t bytes, const std::atomic<bool>& aborted);
void receive_all(const FileDescriptor& socket, void* data, size_t bytes, const std::atomic<bool>& aborted);

// Until the socket is ready for one of `events` (POLLIN, POLLOUT).
void wait_for(const FileDescriptor& socket, short events, const std::atomic<bool>& aborted);

}  // namespace softgpu::nccl
