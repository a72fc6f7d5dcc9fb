#include "bootstrap.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "failure.h"
#include "shared_segment.h"
#include "thread.h"

namespace softgpu::nccl {
namespace {

constexpr char id_prefix[] = "softgpu-nccl-";
constexpr int abort_poll_milliseconds = 50;

struct Hello {
  int32_t rank, ranks;  // ranks == 0: nobody will come
};
struct Reply {
  int32_t result;  // ncclResult_t; with ncclSuccess comes the memfd
  char text[252];
};

sockaddr_un address_of(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // the zero before it makes it abstract
  return address;
}
socklen_t length_of(const std::string& name) {
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

std::string name_in(const ncclUniqueId& id) {
  std::string name(id.internal, strnlen(id.internal, sizeof id.internal));
  if (name.size() != sizeof id_prefix - 1 + 32 || name.compare(0, sizeof id_prefix - 1, id_prefix) != 0) {
    throw Failure(
        ncclInvalidArgument,
        "This unique id was not made by softgpu's ncclGetUniqueId. Make one on one rank and hand all "
        "128 bytes of it to the others.");
  }
  return name;
}

bool is_ours(const FileDescriptor& socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

void send_reply(const FileDescriptor& socket, ncclResult_t result, const std::string& text, int file) {
  Reply reply{.result = result, .text = {}};
  text.copy(reply.text, sizeof reply.text - 1);
  iovec data{&reply, sizeof reply};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (file >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &file, sizeof file);
  }
  // A rank that died in the meantime does not get it; the others wait for it, as with NCCL.
  sendmsg(socket.get(), &message, MSG_NOSIGNAL);
}

// The listener's side, until all ranks have come.
void serve(const FileDescriptor& listener) {
  FileDescriptor memory;
  std::vector<bool> has_come;
  for (size_t missing = 1; missing > 0;) {
    FileDescriptor socket(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      std::fprintf(stderr, "softgpu NCCL: no more ranks can join this communicator (accept: %s).\n",
                   std::strerror(errno));
      return;
    }
    Hello hello;
    if (!is_ours(socket) || recv(socket.get(), &hello, sizeof hello, 0) != sizeof hello) continue;
    if (hello.ranks == 0) return;
    if (hello.ranks > max_ranks || hello.rank < 0 || hello.rank >= hello.ranks) continue;  // not join()
    try {
      if (!memory) {
        memory = SharedSegment::create(hello.ranks);
        has_come.resize(hello.ranks);
        missing = hello.ranks;
      }
      if (static_cast<size_t>(hello.ranks) != has_come.size()) {
        throw Failure(ncclInvalidArgument, "Rank ", hello.rank, " says that the communicator has ",
                      hello.ranks, " ranks, the first to come said ", has_come.size(),
                      ". Pass the same number on all ranks.");
      }
      if (has_come[hello.rank]) {
        throw Failure(ncclInvalidArgument, "Rank ", hello.rank,
                      " has joined this communicator already. Give each process a rank of its own.");
      }
    } catch (const Failure& failure) {
      send_reply(socket, failure.code(), failure.what(), -1);
      continue;
    }
    has_come[hello.rank] = true;
    --missing;
    send_reply(socket, ncclSuccess, "", memory.get());
  }
}

FileDescriptor connect_to(const std::string& name, const std::atomic<bool>& aborted) {
  FileDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw Failure(ncclSystemError, "No socket for NCCL's bootstrap (", std::strerror(errno), ").");
  const sockaddr_un address = address_of(name);
  while (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length_of(name)) != 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN) {
      throw Failure(
          ncclRemoteError, "Nobody listens for ranks with this unique id (", std::strerror(errno),
          "): the process that made it has ended, all ranks have come already, or it runs in another "
          "network namespace.");
    }
    // More ranks at once than the listener's queue holds.
    if (aborted) throw Failure(ncclInternalError, "The communicator was aborted while it was being made.");
    poll(nullptr, 0, abort_poll_milliseconds);
  }
  if (!is_ours(socket)) {
    throw Failure(ncclRemoteError, "Another user listens under the name in this unique id.");
  }
  return socket;
}

}  // namespace

ncclUniqueId make_unique_id() {
  unsigned char random[16];
  if (getrandom(random, sizeof random, 0) != sizeof random) {
    throw Failure(ncclSystemError, "No random name for a unique id (getrandom: ", std::strerror(errno), ").");
  }
  std::string name = id_prefix;
  for (const unsigned char byte : random) {
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  FileDescriptor listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const sockaddr_un address = address_of(name);
  if (!listener || bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length_of(name)) != 0 ||
      listen(listener.get(), SOMAXCONN) != 0) {
    throw Failure(ncclSystemError, "Cannot listen for the ranks of a new communicator (",
                  std::strerror(errno), ").");
  }
  start_thread([listener = std::move(listener)] {
    serve(listener);
    // A forked child may hold the socket too, so closing is not enough for a late rank to be refused.
    shutdown(listener.get(), SHUT_RDWR);
  }).detach();

  ncclUniqueId id{};
  name.copy(id.internal, sizeof id.internal);
  return id;
}

FileDescriptor join(const ncclUniqueId& id, int rank, int ranks, const std::atomic<bool>& aborted) {
  const FileDescriptor socket = connect_to(name_in(id), aborted);
  const Hello hello{rank, ranks};
  if (send(socket.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) {
    throw Failure(ncclRemoteError, "The process that made this unique id has ended (", std::strerror(errno),
                  ").");
  }
  pollfd answer{socket.get(), POLLIN, 0};
  while (poll(&answer, 1, abort_poll_milliseconds) <= 0) {
    if (aborted) throw Failure(ncclInternalError, "The communicator was aborted while it was being made.");
  }

  Reply reply{};
  iovec data{&reply, sizeof reply};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC) != sizeof reply) {
    throw Failure(ncclRemoteError, "The process that made this unique id has ended before rank ", rank,
                  " could join.");
  }
  if (reply.result != ncclSuccess) throw Failure(static_cast<ncclResult_t>(reply.result), reply.text);
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (!header || header->cmsg_type != SCM_RIGHTS) {
    throw Failure(ncclSystemError, "Rank ", rank,
                  " has no file descriptor left for the communicator's memory.");
  }
  int file;
  std::memcpy(&file, CMSG_DATA(header), sizeof file);
  return FileDescriptor(file);
}

void dismiss(const ncclUniqueId& id) {
  const std::atomic<bool> aborted = false;
  const FileDescriptor socket = connect_to(name_in(id), aborted);
  const Hello hello{0, 0};
  send(socket.get(), &hello, sizeof hello, MSG_NOSIGNAL);
}

}  // namespace softgpu::nccl
