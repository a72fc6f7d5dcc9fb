#include "memory_tier/digests.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

namespace jitckpt::memory_tier {
namespace {

Digest digest_in(Digester& digester, std::string_view text) {
  digester.add(std::as_bytes(std::span(text)));
  return digester.finish();
}

// What xxhsum and Python's xxhash say.
TEST(Digester, IsXxh3) {
  Digester digester;
  EXPECT_EQ(digest_in(digester, ""), (Digest{0x99, 0xaa, 0x06, 0xd3, 0x01, 0x47, 0x98, 0xd8, 0x60, 0x01, 0xc3,
                                             0x24, 0x46, 0x8d, 0x49, 0x7f}));
}

TEST(Digester, BeginsAnewAndTakesPiecesOfAnySize) {
  const std::string text(100'003, 'x');
  Digester digester;
  const Digest whole = digest_in(digester, text);
  EXPECT_EQ(digest_in(digester, text), whole);
  for (size_t piece : {1, 7, 4096, 65'537}) {
    for (size_t begin = 0; begin < text.size(); begin += piece)
      digester.add(std::as_bytes(std::span(std::string_view(text).substr(begin, piece))));
    EXPECT_EQ(digester.finish(), whole) << piece;
  }
  EXPECT_NE(digest_in(digester, text + "y"), whole);
  EXPECT_EQ(digest_of(std::as_bytes(std::span(text))), whole);
  EXPECT_EQ(digest_of({}), digest_in(digester, ""));
}

}  // namespace
}  // namespace jitckpt::memory_tier
