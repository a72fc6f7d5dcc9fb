#include "interpose/agent_channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

namespace jitckpt::interpose {
namespace {

constexpr size_t largest_message = 64 * 1024;
constexpr int patience_ms = 1000;

}  // namespace

AgentChannel::AgentChannel(int descriptor) : descriptor_(descriptor) {
  // Programs that the job starts must not keep the socket open after the job has ended.
  if (descriptor >= 0) fcntl(descriptor, F_SETFD, FD_CLOEXEC);
}

bool AgentChannel::send(std::string_view message) {
  for (;;) {
    const int to = descriptor();
    if (to < 0) return false;
    if (::send(to, message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return true;
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return false;
    pollfd room{to, POLLOUT, 0};
    if (poll(&room, 1, patience_ms) == 0) return false;
  }
}

AgentChannel::Received AgentChannel::receive(std::string& message) {
  message.resize(largest_message);
  ssize_t length;
  do {
    length = recv(descriptor(), message.data(), message.size(), MSG_DONTWAIT);
  } while (length < 0 && errno == EINTR);
  message.resize(length > 0 ? static_cast<size_t>(length) : 0);
  if (length > 0) return Received::message;
  return length < 0 && errno == EAGAIN ? Received::nothing : Received::end;
}

}  // namespace jitckpt::interpose
