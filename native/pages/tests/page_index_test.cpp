#include "pages/page_index.h"

#include <gtest/gtest.h>

#include <cstring>
#include <initializer_list>
#include <vector>

namespace jitckpt::pages {
namespace {

using Runs = std::vector<Run>;
constexpr uint64_t none = Run::none;

std::vector<Digest> pages(std::initializer_list<int> contents) {
  std::vector<Digest> digests;
  for (const int content : contents) {
    digests.push_back({});
    std::memcpy(digests.back().data() + 8, &content, sizeof content);  // all have the same slot
  }
  return digests;
}

TEST(PageIndex, FindsRowsThatHaveStoodBefore) {
  PageIndex index(100, 2);
  EXPECT_EQ(index.runs(pages({1, 2, 3, 4}), 10), (Runs{{0, 4, none}}));
  EXPECT_EQ(index.runs(pages({9, 2, 3, 4, 1, 2, 7, 3}), 50),
            (Runs{{0, 1, none}, {1, 4, 11}, {4, 6, 10}, {6, 8, none}}));
  EXPECT_EQ(index.runs(pages({7}), 90), (Runs{{0, 1, none}}));
  EXPECT_TRUE(index.runs({}, 91).empty());
}

TEST(PageIndex, FindsARowInTheSamePages) {
  PageIndex index(100, 2);
  EXPECT_EQ(index.runs(pages({1, 2, 1, 2, 1, 1, 1}), 0), (Runs{{0, 2, none}, {2, 4, 0}, {4, 7, none}}));
}

TEST(PageIndex, KnowsNoMoreThanItMay) {
  PageIndex index(2, 1);
  index.runs(pages({1, 2, 3, 4}), 0);
  EXPECT_EQ(index.runs(pages({1, 2, 3, 4}), 10), (Runs{{0, 2, 0}, {2, 4, none}}));
  PageIndex nothing(0, 1);
  EXPECT_EQ(nothing.runs(pages({1, 1, 1}), 0), (Runs{{0, 3, none}}));
}

TEST(PageIndex, KeepsWhatItKnowsWhereItGrows) {
  constexpr int count = 20'000;
  PageIndex index(count, 1);
  std::vector<Digest> many(count);
  for (int number = 0; number < count; ++number)
    std::memcpy(many[static_cast<size_t>(number)].data(), &number, sizeof number);
  index.runs(many, 5);
  EXPECT_EQ(index.runs(many, 1 << 20), (Runs{{0, count, 5}}));
}

}  // namespace
}  // namespace jitckpt::pages
