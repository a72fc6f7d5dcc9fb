#include "softgpu/nccl/local_memory.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "softgpu/nccl/failure.h"
#include "softgpu/nccl/shared_segment.h"
#include "softgpu/nccl/sockets.h"

namespace softgpu::nccl {
namespace {

Address socket_named(const Key& name) { return abstract_address("softgpu-nccl-" + to_hex(name)); }

// A byte, which has to be there, and room for a file descriptor.
struct FileMessage {
  FileMessage() {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
  }
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
};

void send_file(const FileDescriptor& socket, int file) {
  FileMessage message;
  cmsghdr* header = CMSG_FIRSTHDR(&message.header);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &file, sizeof file);
  // A rank that died in the meantime does not get it; the others wait for it, as with NCCL.
  sendmsg(socket.get(), &message.header, MSG_NOSIGNAL);
}

FileDescriptor receive_file(const FileDescriptor& socket, const std::atomic<bool>& aborted) {
  wait_for(socket, POLLIN, aborted);
  FileMessage message;
  if (recvmsg(socket.get(), &message.header, MSG_CMSG_CLOEXEC) != 1) {
    throw NcclFailure(ncclRemoteError,
                      "The first rank of this host ended while the communicator was being made.");
  }
  const cmsghdr* header = CMSG_FIRSTHDR(&message.header);
  if (!header || header->cmsg_type != SCM_RIGHTS) {
    throw NcclFailure(ncclSystemError,
                      "This process has no file descriptor left for a communicator's memory.");
  }
  int file;
  std::memcpy(&file, CMSG_DATA(header), sizeof file);
  return FileDescriptor(file);
}

}  // namespace

LocalMemory::LocalMemory(const Key& key)
    : name_(random_key()), key_(key), reception_(listen_at(socket_named(name_)), key) {}

FileDescriptor LocalMemory::share(int others, int ranks, const std::atomic<bool>& aborted) {
  FileDescriptor memory = SharedSegment::create(ranks);
  for (; others > 0; --others) send_file(reception_.next(&aborted).socket, memory.get());
  return memory;
}

FileDescriptor LocalMemory::fetch(const Key& name, RankGreeting greeting,
                                  const std::atomic<bool>& aborted) const {
  const FileDescriptor socket = connect_to(socket_named(name), aborted);
  greet(socket, key_, greeting, aborted);
  return receive_file(socket, aborted);
}

}  // namespace softgpu::nccl
