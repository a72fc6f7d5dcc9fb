#include "softgpu/nccl/bootstrap.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "softgpu/nccl/failure.h"
#include "softgpu/nccl/greeting.h"
#include "softgpu/nccl/local_memory.h"
#include "softgpu/nccl/shared_segment.h"
#include "softgpu/nccl/sockets.h"
#include "softgpu/nccl/thread.h"

namespace softgpu::nccl {
namespace {

// An id is this, the secret, a space and the address where its maker listens, as text.
constexpr char id_prefix[] = "softgpu-nccl-";
constexpr size_t prefix_length = sizeof id_prefix - 1;
constexpr size_t secret_length = 2 * sizeof(Key);

struct Id {
  Key key;
  Address address;
};

Id parse(const ncclUniqueId& id) {
  const std::string text(id.internal, strnlen(id.internal, sizeof id.internal));
  Id parsed;
  if (text.size() <= prefix_length + secret_length || text.compare(0, prefix_length, id_prefix) != 0 ||
      !from_hex(text.substr(prefix_length, secret_length), parsed.key)) {
    throw NcclFailure(
        ncclInvalidArgument,
        "This unique id was not made by softgpu's ncclGetUniqueId. Make one on one rank and hand all "
        "128 bytes of it to the others.");
  }
  parsed.address = address_from(text.substr(prefix_length + secret_length + 1));
  return parsed;
}

// What the maker of the id answers to each rank: this, and if it is ncclSuccess an entry for each rank.
struct Reply {
  int32_t result;  // ncclResult_t
  char text[252];
};
struct Entry {
  HostId host;
  Key memory;
  char address[sizeof(RankGreeting::address)];
};

void send_reply(const FileDescriptor& socket, const Key& key, const Reply& reply,
                const std::vector<Entry>& entries) {
  std::vector<std::byte> message(sizeof reply + entries.size() * sizeof(Entry));
  std::memcpy(message.data(), &reply, sizeof reply);
  if (!entries.empty()) {
    std::memcpy(message.data() + sizeof reply, entries.data(), message.size() - sizeof reply);
  }
  const Tag tag = sign(key, message.data(), message.size());
  const auto* bytes = reinterpret_cast<const std::byte*>(tag.data());
  message.insert(message.end(), bytes, bytes + tag.size());
  // It fits into the socket's buffer, so that a stopped rank holds up nobody. A rank that died in the
  // meantime does not get it; the others wait for it, as with NCCL.
  const int size = std::max(1 << 16, static_cast<int>(message.size()));
  setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
  send(socket.get(), message.data(), message.size(), MSG_NOSIGNAL);
}

std::vector<Entry> receive_reply(const FileDescriptor& socket, const Key& key, int ranks,
                                 const std::atomic<bool>& aborted) {
  Reply reply;
  receive_all(socket, &reply, sizeof reply, aborted);
  std::vector<Entry> entries(reply.result == ncclSuccess ? ranks : 0);
  const size_t entry_bytes = entries.size() * sizeof(Entry);
  receive_all(socket, entries.data(), entry_bytes, aborted);
  Tag tag;
  receive_all(socket, tag.data(), tag.size(), aborted);

  std::vector<std::byte> message(sizeof reply + entry_bytes);
  std::memcpy(message.data(), &reply, sizeof reply);
  if (entry_bytes != 0) std::memcpy(message.data() + sizeof reply, entries.data(), entry_bytes);
  if (!are_equal(tag, sign(key, message.data(), message.size()))) {
    throw NcclFailure(ncclRemoteError, "Who answers at the address in this unique id did not make the id.");
  }
  if (reply.result != ncclSuccess) {
    throw NcclFailure(static_cast<ncclResult_t>(reply.result),
                      std::string(reply.text, strnlen(reply.text, sizeof reply.text)));
  }
  return entries;
}

// The maker's side, until all ranks have come.
void serve(Reception& reception, const Key& key) {
  std::vector<Reception::Guest> guests;  // by rank
  for (size_t missing = 1; missing > 0;) {
    Reception::Guest guest = reception.next(nullptr);
    const int rank = guest.greeting.from, ranks = guest.greeting.ranks;
    if (ranks == 0) return;
    if (ranks > max_ranks || rank < 0 || rank >= ranks) continue;  // not join()
    try {
      if (guests.empty()) {
        guests.resize(ranks);
        missing = ranks;
      }
      if (static_cast<size_t>(ranks) != guests.size()) {
        throw NcclFailure(ncclInvalidArgument, "Rank ", rank, " says that the communicator has ", ranks,
                          " ranks, the first to come said ", guests.size(),
                          ". Pass the same number on all ranks.");
      }
      if (guests[rank].socket) {
        throw NcclFailure(ncclInvalidArgument, "Rank ", rank,
                          " has joined this communicator already. Give each process a rank of its own.");
      }
    } catch (const NcclFailure& failure) {
      Reply reply{.result = failure.code(), .text = {}};
      std::string(failure.what()).copy(reply.text, sizeof reply.text - 1);
      send_reply(guest.socket, key, reply, {});
      continue;
    }
    guests[rank] = std::move(guest);
    --missing;
  }

  std::vector<Entry> entries;
  for (const Reception::Guest& guest : guests) {
    entries.push_back({.host = guest.greeting.host, .memory = guest.greeting.memory, .address = {}});
    std::copy_n(guest.greeting.address, sizeof guest.greeting.address, entries.back().address);
  }
  for (const Reception::Guest& guest : guests) {
    send_reply(guest.socket, key, {.result = ncclSuccess, .text = {}}, entries);
  }
}

FileDescriptor fetch_memory(const LocalMemory& memory, const Entry& first, const RankGreeting& greeting,
                            const std::atomic<bool>& aborted) {
  try {
    return memory.fetch(first.memory, greeting, aborted);
  } catch (const NcclFailure& failure) {
    if (failure.code() != ncclRemoteError) throw;
    throw NcclFailure(ncclRemoteError, "Rank ", greeting.to, " is on the host of rank ", greeting.from,
                      ", yet out of its reach: it has ended, or NCCL_HOSTID is the same in two network "
                      "namespaces. Let each have its own.");
  }
}

// First to all, which needs nothing of them but that they listen, then from all: so nobody waits in a circle.
std::vector<RemotePeer> connect_with(const std::vector<int>& remote, const std::vector<Entry>& entries,
                                     RankGreeting greeting, Reception& reception, const Key& key,
                                     const std::atomic<bool>& aborted) {
  std::vector<RemotePeer> peers;
  for (const int rank : remote) {
    RemotePeer peer{.rank = rank, .address = entries[rank].address, .to = {}, .from = {}};
    peer.to = connect_to(address_from(peer.address), aborted);
    greeting.to = rank;
    greet(peer.to, key, greeting, aborted);
    peers.push_back(std::move(peer));
  }
  for (size_t missing = peers.size(); missing > 0;) {
    Reception::Guest guest = reception.next(&aborted);
    const auto known = std::find_if(peers.begin(), peers.end(), [&](const RemotePeer& peer) {
      return peer.rank == guest.greeting.from && !peer.from;
    });
    if (known == peers.end() || guest.greeting.to != greeting.from) continue;
    known->from = std::move(guest.socket);
    --missing;
  }
  return peers;
}

}  // namespace

ncclUniqueId make_unique_id() {
  const Key key = random_key();
  FileDescriptor listener = listen_at(own_address());
  const std::string text = id_prefix + to_hex(key) + ' ' + to_text(address_of(listener));
  start_thread([reception = Reception(std::move(listener), key), key]() mutable {
    try {
      serve(reception, key);
    } catch (const NcclFailure& failure) {
      std::fprintf(stderr, "softgpu NCCL: %s\n", failure.what());
    }
  }).detach();

  ncclUniqueId id{};
  text.copy(id.internal, sizeof id.internal);
  return id;
}

Meeting join(const ncclUniqueId& id, int rank, int ranks, const std::atomic<bool>& aborted) {
  const Id parsed = parse(id);
  // All listen before any of them is told where the others are.
  LocalMemory memory(parsed.key);
  FileDescriptor listener = listen_at(own_address());
  RankGreeting greeting{
      .from = rank, .to = maker_of_id, .ranks = ranks, .host = this_host(), .memory = memory.name()};
  to_text(address_of(listener)).copy(greeting.address, sizeof greeting.address - 1);
  Reception reception(std::move(listener), parsed.key);

  const FileDescriptor socket = connect_to(parsed.address, aborted);
  greet(socket, parsed.key, greeting, aborted);
  const std::vector<Entry> entries = receive_reply(socket, parsed.key, ranks, aborted);

  std::vector<int> local, remote;
  for (int other = 0; other < ranks; ++other) {
    (entries[other].host == greeting.host ? local : remote).push_back(other);
  }
  Meeting meeting;
  if (rank == local[0]) {
    meeting.memory = memory.share(static_cast<int>(local.size()) - 1, ranks, aborted);
  } else {
    greeting.to = local[0];
    meeting.memory = fetch_memory(memory, entries[local[0]], greeting, aborted);
  }
  meeting.remote = connect_with(remote, entries, greeting, reception, parsed.key, aborted);
  return meeting;
}

void dismiss(const ncclUniqueId& id) {
  const Id parsed = parse(id);
  const std::atomic<bool> aborted = false;
  greet(connect_to(parsed.address, aborted), parsed.key, {.to = maker_of_id}, aborted);
}

}  // namespace softgpu::nccl
