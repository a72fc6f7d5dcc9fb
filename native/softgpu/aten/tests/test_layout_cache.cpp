#include <gtest/gtest.h>

#include "softgpu/aten/layout_cache.h"

namespace softgpu::aten {
namespace {

std::shared_ptr<const ResultLayout> layout_of_size(int64_t size) {
  auto layout = std::make_shared<ResultLayout>();
  layout->outputs.emplace_back();
  layout->outputs.back().sizes = {size};
  return layout;
}

TEST(LayoutCache, FindsByTheWholeKey) {
  LayoutCache cache;
  const std::string long_key(1000, 'k');
  EXPECT_EQ(cache.find(long_key), nullptr);
  cache.insert(long_key, layout_of_size(1));
  cache.insert(long_key + "x", layout_of_size(2));
  EXPECT_EQ(cache.find(long_key)->outputs[0].sizes[0], 1);
  EXPECT_EQ(cache.find(long_key + "x")->outputs[0].sizes[0], 2);
  EXPECT_EQ(cache.find(long_key + "y"), nullptr);
}

TEST(LayoutCache, TakesTheNewerOfTwo) {
  LayoutCache cache;
  cache.insert("key", layout_of_size(1));
  cache.insert("key", layout_of_size(2));
  EXPECT_EQ(cache.find("key")->outputs[0].sizes[0], 2);
}

TEST(LayoutCache, DoesNotGrowForEver) {
  LayoutCache cache;
  cache.insert("first", layout_of_size(1));
  for (int i = 0; i < 5000; ++i) cache.insert(std::to_string(i), layout_of_size(i));
  EXPECT_EQ(cache.find("first"), nullptr);
  EXPECT_NE(cache.find("4999"), nullptr);
}

}  // namespace
}  // namespace softgpu::aten
