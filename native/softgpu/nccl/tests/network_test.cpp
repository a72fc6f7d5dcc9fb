// What is under the connections between hosts: the secret, addresses, and strangers who connect.
#include "softgpu/nccl/network.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "softgpu/nccl/failure.h"
#include "softgpu/nccl/greeting.h"
#include "softgpu/nccl/host.h"
#include "softgpu/nccl/news.h"
#include "softgpu/nccl/secret.h"
#include "softgpu/nccl/sockets.h"
#include "softgpu/nccl/tests/rank_processes.h"

namespace {

using namespace softgpu::nccl;

const std::atomic<bool> never = false;

// The key and the messages count up from 0. The first two are of the authors' table, the others as
// openssl mac -macopt hexkey:000102030405060708090a0b0c0d0e0f -macopt size:16 SIPHASH gives them.
TEST(Secret, SignsAsItsAuthorsSay) {
  Key key;
  for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<uint8_t>(i);
  EXPECT_EQ(to_hex(sign(key, key.data(), 0)), "a3817f04ba25a8e66df67214c7550293");
  EXPECT_EQ(to_hex(sign(key, key.data(), 1)), "da87c1d86b99af44347659119b22fc45");
  EXPECT_EQ(to_hex(sign(key, key.data(), 8)), "3b62a9ba6258f5610f83e264f31497b4");
  EXPECT_EQ(to_hex(sign(key, key.data(), 15)), "5493e99933b0a8117e08ec0f97cfc3d9");
}

TEST(Secret, OfEachIdIsAnother) { EXPECT_NE(random_key(), random_key()); }

TEST(Secret, AsDigits) {
  const Key key = random_key();
  Key read;
  EXPECT_TRUE(from_hex(to_hex(key), read));
  EXPECT_EQ(read, key);
  EXPECT_FALSE(from_hex(to_hex(key).substr(1), read));
  std::string wrong = to_hex(key);
  wrong[0] = 'g';
  EXPECT_FALSE(from_hex(wrong, read));
}

TEST(Addresses, AsText) {
  for (const char* text : {"10.0.0.1:4242", "[fd00::1]:65535"}) EXPECT_EQ(to_text(address_from(text)), text);
  for (const char* text : {"", "10.0.0.1", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:7x",
                           "name:1", "fd00::1:7", "[10.0.0.1]:7"}) {
    EXPECT_THROW(address_from(text), NcclFailure) << text;
  }
}

TEST(Hosts, AreToldApartByTheirVariable) {
  run_ranks(1, [](Rank&) {
    unsetenv("NCCL_HOSTID");
    const HostId own = this_host();
    EXPECT_EQ(this_host(), own);
    setenv("NCCL_HOSTID", "first", 1);
    const HostId first = this_host();
    EXPECT_NE(first, own);
    setenv("NCCL_HOSTID", "second", 1);
    EXPECT_NE(this_host(), first);
  });
}

// Whether the other side closes the connection.
bool is_closed(const FileDescriptor& socket) {
  pollfd ready{socket.get(), POLLIN, 0};
  char byte;
  return poll(&ready, 1, 60'000) == 1 && recv(socket.get(), &byte, 1, 0) <= 0;
}

// Who does not know the secret gets nothing, and holds up nobody.
TEST(Strangers, AreNotLetIn) {
  run_ranks(2, [](Rank& rank) {
    const ncclUniqueId id = rank.id();
    std::vector<FileDescriptor> silent;
    if (rank.rank == 0) {
      const std::string text = id.internal;
      const Address address = address_from(text.substr(text.rfind(' ') + 1));
      for (int i = 0; i < 3; ++i) silent.push_back(connect_to(address, never));
      send_all(silent[1], "GET / HTTP/1.0\r\n\r\n", 18, never);

      const FileDescriptor impostor = connect_to(address, never);
      greet(impostor, random_key(), {.from = 0, .to = maker_of_id, .ranks = 2}, never);
      EXPECT_TRUE(is_closed(impostor));

      std::mt19937 random(7);
      std::vector<uint8_t> noise(4096);
      for (uint8_t& byte : noise) byte = static_cast<uint8_t>(random());
      const FileDescriptor noisy = connect_to(address, never);
      send_all(noisy, noise.data(), noise.size(), never);
      EXPECT_TRUE(is_closed(noisy));
    }
    ncclComm_t comm;
    ASSERT_EQ(ncclCommInitRank(&comm, 2, id, rank.rank), ncclSuccess) << ncclGetLastError(nullptr);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

TEST(Strangers, CannotAnswerForTheMakerOfAnId) {
  run_ranks(1, [](Rank& rank) {
    FileDescriptor listener = listen_at(own_address());
    ncclUniqueId forged = rank.id();
    const std::string text =
        std::string(forged.internal, 13) + to_hex(random_key()) + ' ' + to_text(address_of(listener));
    forged = {};
    text.copy(forged.internal, sizeof forged.internal);
    std::thread impostor([&] {
      wait_for(listener, POLLIN, never);
      const FileDescriptor socket(accept(listener.get(), nullptr, nullptr));
      const std::vector<char> reply(256 + 96 + 16);
      send_all(socket, reply.data(), reply.size(), never);
      char byte;
      while (recv(socket.get(), &byte, 1, 0) > 0) continue;
    });
    ncclComm_t comm;
    EXPECT_EQ(ncclCommInitRank(&comm, 1, forged, 0), ncclRemoteError);
    EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("did not make the id"), std::string::npos)
        << ncclGetLastError(nullptr);
    impostor.join();
  });
}

// Rank 0's network with one other rank, whose side is a plain socket.
class ConnectedWithOne : public testing::Test {
 protected:
  ConnectedWithOne() {
    int from[2], to[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, from), 0);
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, to), 0);
    std::vector<RemotePeer> peers;
    peers.push_back({.rank = 1, .address = "", .to = FileDescriptor(to[0]), .from = FileDescriptor(from[0])});
    writes = FileDescriptor(from[1]);
    reads = FileDescriptor(to[1]);
    network = std::make_unique<Network>(0, local, mirror, std::move(peers));
  }
  template <class Condition>
  void wait_until(Condition condition) {
    while (!condition()) usleep(100);
  }

  SharedSegment local{2}, mirror{2};
  FileDescriptor writes, reads;
  std::unique_ptr<Network> network;
};

// However the stream of bytes is cut into pieces.
TEST_F(ConnectedWithOne, WhatItTellsIsSeenInTheMirror) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  std::vector<std::byte> stream, expected(slots * slot_bytes);
  constexpr uint64_t chunks = slots;
  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    News news{.counter = News::Counter::written,
              .offset = static_cast<uint32_t>(random() % 1000),
              .bytes = static_cast<uint32_t>(random() % 100'000),
              .value = chunk + 1};
    news.descriptor.number = 10 + chunk;
    const auto* head = reinterpret_cast<const std::byte*>(&news);
    stream.insert(stream.end(), head, head + sizeof news);
    for (uint32_t i = 0; i < news.bytes; ++i) {
      stream.push_back(static_cast<std::byte>(random()));
      expected[chunk * slot_bytes + news.offset + i] = stream.back();
    }
  }
  for (size_t at = 0; at < stream.size();) {
    const size_t size = std::min<size_t>(1 + random() % (random() % 2 ? 10 : 50'000), stream.size() - at);
    send_all(writes, &stream[at], size, never);
    at += size;
  }
  wait_until([&] { return mirror.rank(1).written == chunks; });
  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    EXPECT_EQ(mirror.rank(1).descriptors[chunk].number, 10 + chunk);
    EXPECT_EQ(std::memcmp(mirror.contribution(1, chunk), &expected[chunk * slot_bytes], slot_bytes), 0);
  }
  EXPECT_FALSE(network->has_ended(1));
  writes = FileDescriptor();
  wait_until([&] { return network->has_ended(1); });
  EXPECT_EQ(network->reason_of_end(1), "connection closed");
}

// Though the other side reads late: what is told waits, and so does flush.
TEST_F(ConnectedWithOne, WhatIsToldIsSentInItsOrder) {
  std::memset(local.contribution(0, 0), 7, slot_bytes);
  constexpr uint64_t times = 20;
  for (uint64_t value = 1; value <= times; ++value) {
    network->send(1,
                  {.counter = News::Counter::written, .bytes = slot_bytes, .value = 1 + (value - 1) * slots});
  }
  bool asked = false;
  network->flush([&] { return std::exchange(asked, true); }, std::chrono::milliseconds(1));
  EXPECT_TRUE(asked);
  for (uint64_t value = 1; value <= times; ++value) {
    News news;
    receive_all(reads, &news, sizeof news, never);
    EXPECT_EQ(news.value, 1 + (value - 1) * slots);
    std::vector<std::byte> data(news.bytes);
    receive_all(reads, data.data(), data.size(), never);
    EXPECT_EQ(data, std::vector<std::byte>(slot_bytes, std::byte{7}));
  }
  network->flush([] { return false; }, std::chrono::seconds(1));
}

class Misfits : public ConnectedWithOne, public testing::WithParamInterface<News> {};
TEST_P(Misfits, AreNotTaken) {
  const News news = GetParam();
  send_all(writes, &news, sizeof news, never);
  wait_until([&] { return network->has_ended(1); });
  EXPECT_EQ(network->reason_of_end(1), "it sends what is not NCCL's");
  EXPECT_EQ(mirror.rank(1).written, 0);
}
using enum News::Counter;
INSTANTIATE_TEST_SUITE_P(
    All, Misfits,
    testing::Values(News{.counter = written, .bytes = slot_bytes + 1, .value = 1},
                    News{.counter = reduced, .offset = slot_bytes, .bytes = 1, .value = 1},
                    News{.counter = written, .offset = ~0u, .bytes = ~0u, .value = 1},
                    News{.counter = written},
                    News{.counter = sent, .offset = 1, .bytes = channel_slot_bytes, .value = 1},
                    News{.counter = done, .bytes = 1, .value = 1}, News{.counter = host_rounds, .value = 1},
                    News{.counter = static_cast<News::Counter>(77), .value = 1}));

}  // namespace
