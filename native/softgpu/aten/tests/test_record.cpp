#include <gtest/gtest.h>

#include "softgpu/aten/record.h"

namespace softgpu::aten {
namespace {

TEST(Record, IsReadAsItWasWritten) {
  Writer writer;
  writer.put(Tag::integer);
  writer.put(int64_t{-7});
  writer.append("text", 4);
  Reader reader(writer.data(), writer.size());
  EXPECT_EQ(reader.get<Tag>(), Tag::integer);
  EXPECT_EQ(reader.get<int64_t>(), -7);
  EXPECT_FALSE(reader.at_end());
  EXPECT_EQ(std::memcmp(reader.take(4), "text", 4), 0);
  EXPECT_TRUE(reader.at_end());
}

TEST(Record, ThatIsTooShortIsRefused) {
  Writer writer;
  writer.put(uint32_t{1});
  Reader reader(writer.data(), writer.size());
  EXPECT_THROW(reader.get<uint64_t>(), std::runtime_error);
  EXPECT_EQ(reader.get<uint32_t>(), 1u);
  EXPECT_THROW(reader.take(1), std::runtime_error);
}

TEST(Record, ReplyFillsItsMemory) { EXPECT_EQ(sizeof(Reply), Reply::capacity); }

}  // namespace
}  // namespace softgpu::aten
