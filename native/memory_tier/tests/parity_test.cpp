#include "memory_tier/parity.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "memory_tier/failure.h"

namespace jitckpt::memory_tier {
namespace {

constexpr uint64_t chunk_size = 64 << 10;

Window memory_of(uint64_t size, int seed) {
  const int descriptor = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  EXPECT_EQ(ftruncate(descriptor, static_cast<off_t>(size)), 0);
  EXPECT_EQ(fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK), 0);
  Window found(descriptor, 0, size, chunk_size);
  close(descriptor);
  for (size_t at = 0; at < size; ++at)
    found.bytes()[at] = static_cast<std::byte>(at * 31 + at / 251 * static_cast<size_t>(seed));
  return found;
}

void add_all(Sum& sum, uint32_t piece, const Window& from, const Window& to) {
  for (uint64_t number = 0; number < from.chunks(); ++number) sum.add(piece, number, from.chunk(number), to);
}

bool starts_with(const Window& whole, const Window& begin) {
  return std::equal(begin.bytes().begin(), begin.bytes().end(), whole.bytes().begin());
}

TEST(ExclusiveOr, DoesEveryByteOfAnyLength) {
  for (const size_t size : {0, 1, 15, 16, 17, 63, 64, 65, 1000}) {
    const Window one = memory_of(2000, 1), two = memory_of(2000, 2), before = memory_of(2000, 1);
    exclusive_or(one.bytes().subspan(3, size), two.bytes().subspan(5, size));
    for (size_t at = 0; at < 2000; ++at) {
      const bool within = at >= 3 && at < 3 + size;
      EXPECT_EQ(one.bytes()[at], within ? before.bytes()[at] ^ two.bytes()[at + 2] : before.bytes()[at]);
    }
  }
}

// Whichever piece comes first, and however old what lies in memory is.
TEST(Sum, OfUnequalPiecesGivesEachOneBack) {
  const Window pieces[] = {memory_of(3 * chunk_size + 5, 1), memory_of(chunk_size / 2, 2),
                           memory_of(2 * chunk_size, 3)};
  for (const auto& order : {std::vector{0, 1, 2}, {1, 2, 0}, {2, 0, 1}}) {
    const Window parity = memory_of(3 * chunk_size + 5, 9);
    Sum sum;
    for (const int piece : order) add_all(sum, static_cast<uint32_t>(piece), pieces[piece], parity);
    for (int lost = 0; lost < 3; ++lost) {
      const Window decoded = memory_of(pieces[lost].bytes().size(), 8);
      Sum again;
      uint32_t number = 0;
      for (const Window* from : {&parity, &pieces[(lost + 1) % 3], &pieces[(lost + 2) % 3]})
        add_all(again, number++, from->part(0, std::min(from->chunks(), decoded.chunks())), decoded);
      EXPECT_TRUE(starts_with(decoded, pieces[lost])) << lost;
    }
  }
}

TEST(Sum, AddsNothingTwice) {
  const Window one = memory_of(2 * chunk_size, 1), two = memory_of(2 * chunk_size, 2),
               parity = memory_of(2 * chunk_size, 9);
  Sum sum;
  sum.add(0, 0, one.chunk(0), parity);
  add_all(sum, 0, one, parity);
  add_all(sum, 0, one, parity);
  EXPECT_EQ(sum.added(0), 2u);
  EXPECT_TRUE(starts_with(parity, one));
  EXPECT_THROW(sum.add(1, 1, two.chunk(1), parity), ChunkFailure);
}

TEST(Sum, WritesNothingOnceItIsEnded) {
  const Window one = memory_of(chunk_size, 1), parity = memory_of(chunk_size, 9),
               before = memory_of(chunk_size, 9);
  Sum sum;
  sum.end();
  EXPECT_THROW(sum.add(0, 0, one.chunk(0), parity), ChunkFailure);
  EXPECT_TRUE(starts_with(parity, before));
}

TEST(Sum, TakesPiecesOnSeveralThreads) {
  const Window one = memory_of(9 * chunk_size, 1), two = memory_of(9 * chunk_size, 2),
               parity = memory_of(9 * chunk_size, 9);
  Sum sum;
  std::thread other([&] { add_all(sum, 1, two, parity); });
  add_all(sum, 0, one, parity);
  other.join();
  exclusive_or(parity.bytes(), two.bytes());
  EXPECT_TRUE(starts_with(parity, one));
}

TEST(Part, IsCutLikeTheWhole) {
  const Window whole = memory_of(3 * chunk_size + 5, 1);
  EXPECT_EQ(whole.part(1, 2).bytes().data(), whole.bytes().data() + chunk_size);
  EXPECT_EQ(whole.part(1, 2).bytes().size(), 2 * chunk_size);
  EXPECT_EQ(whole.part(3, 1).bytes().size(), 5u);
  EXPECT_EQ(whole.part(4, 0).bytes().size(), 0u);
  EXPECT_THROW(whole.part(4, 1), ChunkFailure);
}

}  // namespace
}  // namespace jitckpt::memory_tier
