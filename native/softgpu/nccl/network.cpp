#include "softgpu/nccl/network.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <type_traits>
#include <utility>

#include "softgpu/nccl/failure.h"
#include "softgpu/nccl/thread.h"

namespace softgpu::nccl {
namespace {

static_assert(std::is_trivially_copyable_v<News>);  // it is sent as it lies in memory

using Counter = News::Counter;

size_t length_of(const News& news) { return sizeof news + news.bytes; }

// Nothing that has come may be written elsewhere than into its slot.
bool fits(const News& news) {
  switch (news.counter) {
    case Counter::written:
    case Counter::reduced:
      return news.value > 0 && size_t{news.offset} + news.bytes <= slot_bytes;
    case Counter::sent:
      return news.value > 0 && news.offset == 0 && news.bytes <= channel_slot_bytes;
    case Counter::host_rounds:
      return news.value > 0 && news.offset == 0 && news.bytes == sizeof(HostMessage);
    case Counter::done:
    case Counter::received:
      return news.bytes == 0;
  }
  return false;
}

}  // namespace

Network::Network(int rank, SharedSegment& local, SharedSegment& mirror, std::vector<RemotePeer> peers)
    : rank_(rank), local_(local), mirror_(mirror), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_)
    throw NcclFailure(ncclSystemError, "No eventfd for NCCL's network (", std::strerror(errno), ").");
  for (RemotePeer& peer : peers) peers_[peer.rank] = std::make_unique<Peer>(std::move(peer));
  thread_ = start_thread([this] { run(); });
}

void Network::send(int rank, const News& news) {
  const std::lock_guard lock(mutex_);
  Peer& peer = *peers_.at(rank);
  if (peer.takes_no_more || stopped_) return;
  peer.unsent.push_back(news);
  transmit(peer);
  if (!peer.unsent.empty()) wake();
}

void Network::flush(const std::function<bool()>& give_up, std::chrono::milliseconds interval) {
  std::unique_lock lock(mutex_);
  const auto is_all_sent = [&] {
    return std::all_of(peers_.begin(), peers_.end(),
                       [](const auto& entry) { return entry.second->unsent.empty(); });
  };
  while (!is_all_sent() && !stopped_ && !give_up()) all_sent_.wait_for(lock, interval);
}

void Network::stop() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(stopped_, true)) return;
    all_sent_.notify_all();
    wake();
  }
  thread_.join();
  // A forked child may hold them too, so closing is not enough for the other side to hear of it.
  for (const auto& [rank, peer] : peers_) {
    shutdown(peer->remote.to.get(), SHUT_RDWR);
    shutdown(peer->remote.from.get(), SHUT_RDWR);
  }
}

void Network::run() {
  for (;;) {
    std::vector<pollfd> sockets{{wake_.get(), POLLIN, 0}};
    std::vector<Peer*> owners{nullptr};
    {
      const std::lock_guard lock(mutex_);
      if (stopped_) return;
      for (const auto& [rank, peer] : peers_) {
        if (!peer->ended) {
          sockets.push_back({peer->remote.from.get(), POLLIN, 0});
          owners.push_back(peer.get());
        }
        if (!peer->unsent.empty()) {
          sockets.push_back({peer->remote.to.get(), POLLOUT, 0});
          owners.push_back(peer.get());
        }
      }
    }
    poll(sockets.data(), sockets.size(), -1);
    eventfd_t rings;
    if (sockets[0].revents != 0) eventfd_read(wake_.get(), &rings);
    for (size_t i = 1; i < sockets.size(); ++i) {
      if (sockets[i].revents == 0) continue;
      if (sockets[i].events == POLLIN) {
        receive(*owners[i]);
      } else {
        const std::lock_guard lock(mutex_);
        transmit(*owners[i]);
      }
    }
  }
}

// As much as the system takes without waiting.
void Network::transmit(Peer& peer) {
  while (!peer.unsent.empty()) {
    News& news = peer.unsent.front();
    const size_t of_head = std::min(peer.sent_of_first, sizeof news), of_slot = peer.sent_of_first - of_head;
    iovec parts[] = {{reinterpret_cast<std::byte*>(&news) + of_head, sizeof news - of_head},
                     {slot_of(news, rank_, peer.remote.rank) + of_slot, news.bytes - of_slot}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = news.bytes == 0 ? 1 : 2;
    const ssize_t sent = sendmsg(peer.remote.to.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return;
      // The other side may well be content with what it has. Whether it is missed is seen in what it sends.
      if (errno != EPIPE && errno != ECONNRESET) end(peer, std::strerror(errno));
      peer.takes_no_more = true;
      peer.unsent.clear();
      break;
    }
    peer.sent_of_first += sent;
    if (peer.sent_of_first < length_of(news)) continue;
    peer.sent_of_first = 0;
    peer.unsent.pop_front();
  }
  all_sent_.notify_all();
}

// All that is there. The slot is filled before the counter speaks of it.
void Network::receive(Peer& peer) {
  News& news = peer.incoming;
  for (;;) {
    std::byte* to;
    size_t missing;
    if (peer.received < sizeof news) {
      to = reinterpret_cast<std::byte*>(&news) + peer.received;
      missing = sizeof news - peer.received;
    } else {
      const size_t of_slot = peer.received - sizeof news;
      to = slot_of(news, peer.remote.rank, rank_) + of_slot;
      missing = news.bytes - of_slot;
    }
    const ssize_t received = recv(peer.remote.from.get(), to, missing, MSG_DONTWAIT);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && errno == EAGAIN) return;
    if (received <= 0) {
      const std::string reason = received == 0 ? "connection closed" : std::strerror(errno);
      const std::lock_guard lock(mutex_);
      return end(peer, reason);
    }
    peer.received += received;
    if (peer.received < sizeof news) continue;
    if (!fits(news)) {
      const std::lock_guard lock(mutex_);
      return end(peer, "it sends what is not NCCL's");
    }
    if (peer.received < length_of(news)) continue;
    publish(peer);
    peer.received = 0;
  }
}

void Network::publish(const Peer& peer) {
  const News& news = peer.incoming;
  const int from = peer.remote.rank;
  const uint64_t chunk = news.value - 1;
  RankState& state = mirror_.rank(from);
  RankState& own = local_.rank(rank_);
  switch (news.counter) {
    case Counter::written:
      state.descriptors[chunk % slots] = news.descriptor;
      state.written = news.value;
      break;
    case Counter::reduced:
      state.reduced = news.value;
      break;
    case Counter::done:
      state.done = news.value;
      break;
    case Counter::sent: {
      Channel& channel = mirror_.channel(from, rank_);
      channel.descriptors[chunk % channel_slots] = news.descriptor;
      channel.written = news.value;
      break;
    }
    case Counter::received:
      mirror_.channel(rank_, from).read = news.value;
      break;
    case Counter::host_rounds:
      state.host_rounds = news.value;
      return own.host_bell.ring();
  }
  own.device_bell.ring();
}

void Network::end(Peer& peer, const std::string& reason) {
  if (peer.ended) return;
  peer.reason = reason;
  peer.ended = true;
  local_.rank(rank_).device_bell.ring();
  local_.rank(rank_).host_bell.ring();
}

std::byte* Network::slot_of(const News& news, int from, int to) {
  SharedSegment& segment = from == rank_ ? local_ : mirror_;
  switch (news.counter) {
    case Counter::written:
      return segment.contribution(from, news.value - 1) + news.offset;
    case Counter::reduced:
      return segment.result(from, news.value - 1) + news.offset;
    case Counter::sent:
      return mirror_.channel_slot(from, to, news.value - 1);
    case Counter::host_rounds:
      return reinterpret_cast<std::byte*>(&segment.rank(from).host_messages[(news.value - 1) % 2]);
    default:
      return nullptr;
  }
}

void Network::wake() { eventfd_write(wake_.get(), 1); }

}  // namespace softgpu::nccl
