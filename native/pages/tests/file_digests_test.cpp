#include "pages/file_digests.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <string>
#include <system_error>

namespace jitckpt::pages {
namespace {

TEST(FileDigests, AreThoseOfTheBytes) {
  std::string content(70 * page_size + 99, 'x');
  for (size_t at = 0; at < content.size(); at += 777) content[at] = static_cast<char>(at);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::tmpfile(), &std::fclose);
  ASSERT_EQ(std::fwrite(content.data(), 1, content.size(), file.get()), content.size());
  std::fflush(file.get());
  const int number = fileno(file.get());
  const auto bytes = std::as_bytes(std::span(content));
  const std::vector<Digest> digests = digests_of(number, 0, content.size());
  EXPECT_EQ(digests.size(), 71u);
  EXPECT_EQ(digests, digests_of(bytes));
  EXPECT_EQ(digests[70], memory_tier::digest_of(bytes.last(99)));
  EXPECT_EQ(digests_of(number, 5, 6000), digests_of(bytes.subspan(5, 6000)));
  EXPECT_TRUE(digests_of(number, 0, 0).empty());
  EXPECT_NE(whole(digests), whole(std::span(digests).first(70)));
}

TEST(FileDigests, OfWhatIsNotThereAreNone) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::tmpfile(), &std::fclose);
  EXPECT_THROW(digests_of(fileno(file.get()), 0, 1), std::system_error);
  try {
    digests_of(-1, 0, 1);
    FAIL();
  } catch (const std::system_error& error) {
    EXPECT_EQ(error.code().value(), EBADF);
  }
}

}  // namespace
}  // namespace jitckpt::pages
