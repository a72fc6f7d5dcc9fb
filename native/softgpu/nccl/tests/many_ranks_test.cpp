// As many ranks as there are processors in a large host, in several communicators at once.
#include <gtest/gtest.h>
#include <nccl.h>

#include <memory>
#include <vector>

#include "softgpu/nccl/tests/rank_processes.h"

namespace {

// The sum of a number of each rank, on several communicators at once.
std::vector<int> sums(const std::vector<ncclComm_t>& comms, int number) {
  const Stream stream;
  std::vector<std::unique_ptr<Buffer>> buffers;
  EXPECT_EQ(ncclGroupStart(), ncclSuccess);
  for (const ncclComm_t comm : comms) {
    buffers.push_back(std::make_unique<Buffer>(bytes_of(std::vector<int>{number})));
    std::byte* at = buffers.back()->at();
    EXPECT_EQ(ncclAllReduce(at, at, 1, ncclInt32, ncclSum, comm, stream), ncclSuccess)
        << ncclGetLastError(comm);
  }
  EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
  stream.synchronize();
  std::vector<int> results;
  for (const auto& buffer : buffers) results.push_back(values_in<int>(*buffer)[0]);
  return results;
}

ncclComm_t split(ncclComm_t comm, int color, int key) {
  ncclComm_t part = nullptr;
  EXPECT_EQ(ncclCommSplit(comm, color, key, &part, nullptr), ncclSuccess) << ncclGetLastError(comm);
  return part;
}

// 4 x 4 ranks: rows, columns, and the halves of both.
TEST(ManyRanks, InSplitsOfSplitsAtOnce) {
  run_ranks(16, [](Rank& rank) {
    const int row = rank.rank / 4, column = rank.rank % 4;
    const ncclComm_t all = rank.communicator(0), twin = rank.communicator(1);
    const ncclComm_t in_row = split(all, row, 0), in_column = split(twin, column, -row);
    const ncclComm_t half_row = split(in_row, column / 2, 0), half_column = split(in_column, row / 2, 0);
    ASSERT_FALSE(testing::Test::HasFailure());
    for (int round = 1; round <= 3; ++round) {
      const int mine = round * rank.rank, below = row / 2 * 2, left = column / 2 * 2;
      EXPECT_EQ(sums({all, in_row, half_column, twin, in_column, half_row}, mine),
                (std::vector<int>{round * 120, round * (16 * row + 6),
                                  round * (4 * below + column + 4 * (below + 1) + column), round * 120,
                                  round * (4 * column + 24), round * (2 * 4 * row + left + left + 1)}));
    }
    int rank_in_column = -1;
    EXPECT_EQ(ncclCommUserRank(in_column, &rank_in_column), ncclSuccess);
    EXPECT_EQ(rank_in_column, 3 - row);  // by their keys
    for (const ncclComm_t comm : {half_row, half_column, in_row, in_column, twin, all}) {
      EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
    }
  });
}

}  // namespace
