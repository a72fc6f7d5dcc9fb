#include "memory_tier/transfer.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "memory_tier/failure.h"

namespace jitckpt::memory_tier {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t chunk = 64 << 10;
constexpr auto patience = 60s;  // finds what hangs, never a slow machine

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) { EXPECT_GE(number, 0); }
  ~Descriptor() { end(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  operator int() const { return number_; }
  void end() {
    if (number_ >= 0) close(number_);
    number_ = -1;
  }

 private:
  int number_;
};

int memory_of(uint64_t size, bool sealed = true) {
  const int descriptor = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  EXPECT_EQ(ftruncate(descriptor, static_cast<off_t>(size)), 0);
  EXPECT_EQ(fcntl(descriptor, F_ADD_SEALS, sealed ? F_SEAL_SHRINK : 0), 0);
  return descriptor;
}

// Why a call has failed; none if it has not.
template <typename Call>
std::optional<Reason> reason_of(Call call) {
  try {
    call();
    return std::nullopt;
  } catch (const ChunkFailure& failure) {
    return failure.reason;
  }
}

struct Transfer : testing::Test {
  explicit Transfer(uint64_t bytes = 10 * chunk + 12'345)
      : size(bytes), from_memory(memory_of(size + 100)), to_memory(memory_of(size + 100)) {
    for (size_t at = 0; at < size; ++at) from.bytes()[at] = static_cast<std::byte>(at * 31 + at / chunk);
    digests = digests_of(from);
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    sender.emplace(ends[0]);
    receiver.emplace(ends[1]);
  }

  std::future<std::optional<Reason>> sending(std::chrono::nanoseconds patient = patience, int stop = -1) {
    return std::async(std::launch::async, [this, patient, stop] {
      return reason_of([&] {
        ChunkConnection connection(*sender, stop, patient);
        send_chunks(connection, from, digests, pace);
      });
    });
  }

  std::optional<Reason> receive(std::chrono::nanoseconds patient = patience, int stop = -1) {
    return reason_of([&] {
      ChunkConnection connection(*receiver, stop, patient);
      receive_chunks(connection, to, digests);
    });
  }

  void say(std::initializer_list<uint32_t> words) {
    for (uint32_t word : words) ASSERT_EQ(write(*sender, &word, sizeof word), ssize_t{sizeof word});
  }

  // The connection is where it was: what is said now is heard.
  void expect_to_be_in_step() {
    for (const auto& [one, other] : {std::pair<int, int>(*sender, *receiver), {*receiver, *sender}}) {
      char heard = 0;
      EXPECT_EQ(write(one, "!", 1), 1);
      EXPECT_EQ(recv(other, &heard, 1, MSG_DONTWAIT), 1);
      EXPECT_EQ(heard, '!');
    }
  }

  uint64_t size;
  Descriptor from_memory, to_memory;
  Window from{from_memory, 100, size, chunk}, to{to_memory, 100, size, chunk};
  std::vector<Digest> digests;
  Pace pace;
  std::optional<Descriptor> sender, receiver;
};

TEST_F(Transfer, AllArrives) {
  auto sent = sending();
  EXPECT_EQ(receive(), std::nullopt);
  EXPECT_EQ(sent.get(), std::nullopt);
  EXPECT_TRUE(std::ranges::equal(from.bytes(), to.bytes()));
  expect_to_be_in_step();
}

TEST_F(Transfer, AllArrivesAtARate) {
  pace.set_rate(50e6);
  auto sent = sending();
  EXPECT_EQ(receive(), std::nullopt);
  EXPECT_EQ(sent.get(), std::nullopt);
  EXPECT_TRUE(std::ranges::equal(from.bytes(), to.bytes()));
}

TEST_F(Transfer, ADamagedChunkIsFoundWhereverItIsAndTheConnectionGoesOn) {
  for (uint64_t number = 0; number < from.chunks(); ++number) {
    from.chunk(number)[17] ^= std::byte{1};
    auto sent = sending();
    EXPECT_EQ(receive(), Reason::damaged) << number;
    EXPECT_EQ(sent.get(), Reason::damaged) << number;
    expect_to_be_in_step();
    from.chunk(number)[17] ^= std::byte{1};
  }
  auto sent = sending();
  EXPECT_EQ(receive(), std::nullopt);
  EXPECT_EQ(sent.get(), std::nullopt);
}

TEST_F(Transfer, WhatIsRightHereAndWrongThereIsRefused) {
  auto sent = sending();
  std::vector<Digest> others = digests;
  others[3][0] ^= 1;
  EXPECT_EQ(reason_of([&] {
              ChunkConnection connection(*receiver, -1, patience);
              receive_chunks(connection, to, others);
            }),
            Reason::damaged);
  EXPECT_EQ(sent.get(), Reason::refused);
  expect_to_be_in_step();
}

TEST_F(Transfer, TheOthersEndIsSeenOnBothSides) {
  auto sent = sending();
  receiver->end();
  EXPECT_EQ(sent.get(), Reason::ended);
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  sender.emplace(ends[0]);
  receiver.emplace(ends[1]);
  say({0, chunk, 1, 2, 3});
  sender->end();
  EXPECT_EQ(receive(), Reason::ended);
}

TEST_F(Transfer, WhoSaysNothingIsSilent) {
  EXPECT_EQ(receive(10ms), Reason::silent);
  EXPECT_EQ(sending(10ms).get(), Reason::silent) << "four chunks are not answered";
}

TEST_F(Transfer, BothAreStopped) {
  const Descriptor stop(eventfd(0, EFD_CLOEXEC));
  auto sent = sending(patience, stop);
  ASSERT_EQ(eventfd_write(stop, 1), 0);
  EXPECT_EQ(sent.get(), Reason::stopped);
  pace.set_rate(1);
  EXPECT_EQ(sending(patience, stop).get(), Reason::stopped);
}

TEST_F(Transfer, AReceiverIsStopped) {
  const Descriptor stop(eventfd(0, EFD_CLOEXEC));
  ASSERT_EQ(eventfd_write(stop, 1), 0);
  EXPECT_EQ(receive(patience, stop), Reason::stopped);
}

TEST_F(Transfer, EveryNumberAndLengthIsComparedBeforeItIsUsed) {
  const std::initializer_list<uint32_t> nonsense[] = {
      {1, chunk}, {0, chunk + 1}, {0, 0}, {0, UINT32_MAX}, {UINT32_MAX, chunk}};
  for (const auto& words : nonsense) {
    say(words);
    EXPECT_EQ(receive(), Reason::nonsense);
  }
}

TEST_F(Transfer, NoMoreThanFourChunksAreThrownAway) {
  say({0, chunk});
  const std::vector<std::byte> wrong(chunk);
  std::thread talker([&] {
    ChunkConnection connection(*sender, -1, patience);
    connection.send(wrong, false);
    for (uint32_t number = 1; number <= most_unanswered; ++number) {
      const uint32_t words[] = {number, chunk};
      connection.send(std::as_bytes(std::span(words)), false);
      if (number < most_unanswered) connection.send(wrong, false);
    }
  });
  EXPECT_EQ(receive(), Reason::nonsense);
  talker.join();
}

TEST_F(Transfer, AnAnswerThatIsNoneEndsIt) {
  const uint32_t words[] = {7, 1};
  ASSERT_EQ(write(*receiver, words, sizeof words), ssize_t{sizeof words});
  EXPECT_EQ(sending().get(), Reason::nonsense);
}

TEST_F(Transfer, OtherChecksumsThanChunksAreRefused) {
  digests.pop_back();
  EXPECT_EQ(sending().get(), Reason::no_memory);
  EXPECT_EQ(receive(), Reason::no_memory);
}

struct Empty : Transfer {
  Empty() : Transfer(0) {}
};

TEST_F(Empty, ArrivesToo) {
  auto sent = sending();
  EXPECT_EQ(receive(), std::nullopt);
  EXPECT_EQ(sent.get(), std::nullopt);
}

TEST(Windows, OnlyMemoryThatCantShrinkIsMapped) {
  const auto reason = [](int descriptor, uint64_t offset, uint64_t size, uint64_t chunks) {
    return reason_of([&] { Window(descriptor, offset, size, chunks); });
  };
  const Descriptor sealed(memory_of(2 * chunk)), other(memory_of(2 * chunk, false)),
      file(open("/proc/self/exe", O_RDONLY));
  EXPECT_EQ(reason(sealed, 0, 2 * chunk, chunk), std::nullopt);
  EXPECT_EQ(reason(sealed, 1, 2 * chunk, chunk), Reason::no_memory);
  EXPECT_EQ(reason(sealed, UINT64_MAX, 2, chunk), Reason::no_memory);
  EXPECT_EQ(reason(sealed, 0, UINT64_MAX, chunk), Reason::no_memory);
  EXPECT_EQ(reason(sealed, 0, chunk, 0), Reason::no_memory);
  EXPECT_EQ(reason(sealed, 0, chunk, most_chunk + 1), Reason::no_memory);
  EXPECT_EQ(reason(other, 0, chunk, chunk), Reason::no_memory);
  EXPECT_EQ(reason(file, 0, 100, chunk), Reason::no_memory);
  EXPECT_EQ(reason(-1, 0, 0, chunk), Reason::no_memory);
}

TEST_F(Transfer, WhatCanOnlyBeReadIsVerifiedAndNeverWritten) {
  const Descriptor reading(
      open(("/proc/self/fd/" + std::to_string(from_memory)).c_str(), O_RDONLY | O_CLOEXEC));
  const Window window(reading, 100, size, chunk);
  EXPECT_EQ(reason_of([&] { verify(window, digests); }), std::nullopt);
  EXPECT_EQ(reason_of([&] {
              ChunkConnection connection(*receiver, -1, patience);
              receive_chunks(connection, window, digests);
            }),
            Reason::no_memory);
}

TEST(Windows, WhatIsCopiedIsVerified) {
  const Descriptor memory(memory_of(chunk));
  const Window window(memory, 0, chunk, chunk);
  std::vector<Digest> digests = digests_of(window);
  std::vector<std::byte> target(chunk, std::byte{1});
  copy(window, digests, target);
  EXPECT_TRUE(std::ranges::equal(window.bytes(), target));
  EXPECT_EQ(reason_of([&] { copy(window, digests, std::span(target).first(1)); }), Reason::no_memory);
  digests[0][15] ^= 1;
  EXPECT_EQ(reason_of([&] { copy(window, digests, target); }), Reason::damaged);
  EXPECT_EQ(reason_of([&] { verify(window, digests); }), Reason::damaged);
}

}  // namespace
}  // namespace jitckpt::memory_tier
