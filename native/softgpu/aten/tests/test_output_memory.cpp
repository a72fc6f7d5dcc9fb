#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "softgpu/aten/output_memory.h"

namespace softgpu::aten {
namespace {

class OutputMemoryTest : public testing::Test {
 protected:
  static void SetUpTestSuite() { install_output_memory(); }

  alignas(64) std::array<char, 64> first_{};
  alignas(64) std::array<char, 64> second_{};
};

TEST_F(OutputMemoryTest, HandsBlocksOutInOrderToAllocationsOfTheirSize) {
  std::array<OutputBlock, 2> blocks = {{{first_.data(), 64}, {second_.data(), 64}}};
  OutputMemory memory(blocks);
  const c10::DataPtr other = c10::GetCPUAllocator()->allocate(63);
  const c10::DataPtr one = c10::GetCPUAllocator()->allocate(64);
  const c10::DataPtr two = c10::GetCPUAllocator()->allocate(64);
  const c10::DataPtr three = c10::GetCPUAllocator()->allocate(64);
  EXPECT_NE(other.get(), first_.data());
  EXPECT_EQ(one.get(), first_.data());
  EXPECT_EQ(two.get(), second_.data());
  EXPECT_NE(three.get(), first_.data());
  EXPECT_NE(three.get(), second_.data());
}

TEST_F(OutputMemoryTest, LeavesATakenBlockAlone) {
  std::array<OutputBlock, 1> blocks = {{{first_.data(), 64, true}}};
  OutputMemory memory(blocks);
  EXPECT_NE(c10::GetCPUAllocator()->allocate(64).get(), first_.data());
}

TEST_F(OutputMemoryTest, IsFreedByNobodyWhereAKernelUsesItAsScratch) {
  std::array<OutputBlock, 1> blocks = {{{first_.data(), 64}}};
  OutputMemory memory(blocks);
  void* scratch = c10::GetCPUAllocator()->raw_allocate(64);
  void* usual = c10::GetCPUAllocator()->raw_allocate(100);
  EXPECT_EQ(scratch, first_.data());
  c10::GetCPUAllocator()->raw_deallocate(scratch);
  c10::GetCPUAllocator()->raw_deallocate(usual);
}

TEST_F(OutputMemoryTest, IsForItsThreadAndItsLifetimeOnly) {
  std::array<OutputBlock, 1> blocks = {{{first_.data(), 64}}};
  {
    OutputMemory memory(blocks);
    std::thread([&] { EXPECT_NE(c10::GetCPUAllocator()->allocate(64).get(), first_.data()); }).join();
  }
  EXPECT_NE(c10::GetCPUAllocator()->allocate(64).get(), first_.data());
}

}  // namespace
}  // namespace softgpu::aten
