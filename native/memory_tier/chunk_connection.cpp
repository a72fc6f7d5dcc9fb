#include "memory_tier/chunk_connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "memory_tier/failure.h"

namespace jitckpt::memory_tier {
namespace {

[[noreturn]] void ended(int error) {
  throw ChunkFailure(Reason::ended, error ? std::strerror(error) : "the other side has closed it");
}

constexpr size_t most_at_once = 1 << 20;

[[noreturn]] void silent() { throw ChunkFailure(Reason::silent, "the other side takes and sends nothing"); }

bool would_wait() { return errno == EAGAIN || errno == EWOULDBLOCK; }

timespec in_timespec(std::chrono::nanoseconds left) {
  const auto count = std::max<int64_t>(0, left.count());
  return {count / 1'000'000'000, count % 1'000'000'000};
}

}  // namespace

bool ChunkConnection::wait_for(short events) {
  const auto until = Clock::now() + patience_;
  while (true) {
    pollfd watched[] = {{socket_, events, 0}, {stop_, POLLIN, 0}};
    const timespec left = in_timespec(until - Clock::now());
    const int ready = ppoll(watched, 2, &left, nullptr);
    if (ready < 0 && errno != EINTR) ended(errno);
    if (ready > 0 && watched[1].revents) throw ChunkFailure(Reason::stopped, "it was stopped");
    if (ready > 0) return true;
    if (Clock::now() >= until) return false;
  }
}

void ChunkConnection::wait_until(Clock::time_point when) {
  while (Clock::now() < when) {
    pollfd watched{stop_, POLLIN, 0};
    const timespec left = in_timespec(when - Clock::now());
    if (ppoll(&watched, 1, &left, nullptr) > 0) throw ChunkFailure(Reason::stopped, "it was stopped");
  }
}

bool ChunkConnection::has_something() const {
  pollfd watched{socket_, POLLIN, 0};
  return poll(&watched, 1, 0) > 0;
}

// To be woken for every packet takes longer than to copy what is in it.
void ChunkConnection::be_woken_for(size_t bytes) {
  const int wanted = static_cast<int>(std::min<size_t>(bytes, most_at_once));
  if (wanted != woken_for_ && setsockopt(socket_, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted) == 0)
    woken_for_ = wanted;
}

void ChunkConnection::receive(std::span<std::byte> whole) {
  while (!whole.empty()) {
    const ssize_t count = recv(socket_, whole.data(), whole.size(), MSG_DONTWAIT);
    if (count > 0)
      whole = whole.subspan(static_cast<size_t>(count));
    else if (count == 0)
      ended(0);
    else if (would_wait()) {
      be_woken_for(whole.size());
      if (wait_for(POLLIN)) continue;
      be_woken_for(1);  // less than that may have come
      if (!has_something()) silent();
    } else if (errno != EINTR)
      ended(errno);
  }
}

void ChunkConnection::send(std::span<const std::byte> whole, bool more_follows) {
  while (!whole.empty()) {
    const int flags = MSG_DONTWAIT | MSG_NOSIGNAL | (more_follows ? MSG_MORE : 0);
    const ssize_t count = ::send(socket_, whole.data(), whole.size(), flags);
    if (count >= 0)
      whole = whole.subspan(static_cast<size_t>(count));
    else if (would_wait()) {
      if (!wait_for(POLLOUT)) silent();
    } else if (errno != EINTR)
      ended(errno);
  }
}

}  // namespace jitckpt::memory_tier
