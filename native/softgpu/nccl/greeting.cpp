#include "softgpu/nccl/greeting.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <type_traits>

#include "softgpu/nccl/failure.h"
#include "softgpu/nccl/sockets.h"

namespace softgpu::nccl {
namespace {

constexpr size_t most_waiting = 256;

struct Signed {
  RankGreeting greeting;
  Tag tag;
};
static_assert(std::has_unique_object_representations_v<Signed>);  // no gaps: all of it is signed

// A connection is readable when so many bytes have come.
void wake_after(const FileDescriptor& socket, int bytes) {
  setsockopt(socket.get(), SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

}  // namespace

void greet(const FileDescriptor& socket, const Key& key, const RankGreeting& greeting,
           const std::atomic<bool>& aborted) {
  const Signed message{greeting, sign(key, &greeting, sizeof greeting)};
  send_all(socket, &message, sizeof message, aborted);
}

Reception::~Reception() {
  // A forked child may hold the listener too, so closing is not enough for a late rank to be refused.
  if (listener_) shutdown(listener_.get(), SHUT_RDWR);
}

Reception::Guest Reception::next(const std::atomic<bool>* aborted) {
  for (;;) {
    std::vector<pollfd> sockets{{listener_.get(), POLLIN, 0}};
    for (const FileDescriptor& socket : waiting_) sockets.push_back({socket.get(), POLLIN, 0});
    poll(sockets.data(), sockets.size(), aborted ? abort_poll_milliseconds : -1);
    if (aborted && *aborted) {
      throw NcclFailure(ncclInternalError, "The communicator was aborted while it was being made.");
    }
    if (sockets[0].revents != 0) accept_one();
    for (size_t i = 1; i < sockets.size(); ++i) {
      if (sockets[i].revents == 0) continue;
      Guest guest{std::move(waiting_[i - 1]), {}};
      waiting_.erase(waiting_.begin() + static_cast<ptrdiff_t>(i - 1));
      if (is_welcome(guest.socket, guest.greeting)) return guest;
      break;  // the others have moved up
    }
  }
}

void Reception::accept_one() {
  FileDescriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) {
    if (errno == EINTR || errno == ECONNABORTED || errno == EAGAIN) return;
    throw NcclFailure(ncclSystemError,
                      "No more ranks can join this communicator (accept: ", std::strerror(errno), ").");
  }
  wake_after(socket, sizeof(Signed));
  // Strangers who say nothing must not use up the descriptors.
  if (waiting_.size() == most_waiting) waiting_.erase(waiting_.begin());
  waiting_.push_back(std::move(socket));
}

bool Reception::is_welcome(const FileDescriptor& socket, RankGreeting& greeting) const {
  Signed message;
  if (recv(socket.get(), &message, sizeof message, 0) != sizeof message) return false;
  if (!are_equal(message.tag, sign(key_, &message.greeting, sizeof message.greeting))) return false;
  if (std::memcmp(message.greeting.protocol, RankGreeting{}.protocol, sizeof message.greeting.protocol) !=
      0) {
    return false;
  }
  wake_after(socket, 1);
  greeting = message.greeting;
  return true;
}

}  // namespace softgpu::nccl
