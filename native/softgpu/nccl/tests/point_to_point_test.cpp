// Sends, receives and groups.
#include <gtest/gtest.h>
#include <nccl.h>

#include <algorithm>
#include <memory>
#include <random>

#include "softgpu/nccl/tests/rank_processes.h"
#include "softgpu/nccl/tests/reference.h"

namespace {

constexpr size_t many = 1'000'000;  // floats: far more than a channel holds

std::vector<float> pattern(int from, int to, size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(from * 1000 + to * 100 + i % 97);
  return values;
}

TEST(PointToPoint, SendsAndReceives) {
  run_ranks(2, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    for (const size_t count : {size_t{1}, size_t{1000}, many, size_t{0}}) {
      const Buffer buffer(bytes_of(rank.rank == 0 ? pattern(0, 1, count) : std::vector<float>(count)));
      if (rank.rank == 0) {
        ASSERT_EQ(ncclSend(buffer.at(), count, ncclFloat32, 1, comm, stream), ncclSuccess);
      } else {
        ASSERT_EQ(ncclRecv(buffer.at(), count, ncclFloat32, 0, comm, stream), ncclSuccess);
      }
      stream.synchronize();
      EXPECT_EQ(values_in<float>(buffer), pattern(0, 1, count));
    }
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

// All send first: without a group they would wait for each other for ever.
TEST(PointToPoint, InAGroupAnyOrderProgresses) {
  run_ranks(3, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    const int next = (rank.rank + 1) % 3, previous = (rank.rank + 2) % 3;
    const Buffer to_next(bytes_of(pattern(rank.rank, next, many)));
    const Buffer to_previous(bytes_of(pattern(rank.rank, previous, many)));
    const Buffer from_next(many * 4), from_previous(many * 4);
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);
    ASSERT_EQ(ncclSend(to_next.at(), many, ncclFloat32, next, comm, stream), ncclSuccess);
    ASSERT_EQ(ncclSend(to_previous.at(), many, ncclFloat32, previous, comm, stream), ncclSuccess);
    ASSERT_EQ(ncclRecv(from_next.at(), many, ncclFloat32, next, comm, stream), ncclSuccess);
    ASSERT_EQ(ncclRecv(from_previous.at(), many, ncclFloat32, previous, comm, stream), ncclSuccess);
    ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
    stream.synchronize();
    EXPECT_EQ(values_in<float>(from_next), pattern(next, rank.rank, many));
    EXPECT_EQ(values_in<float>(from_previous), pattern(previous, rank.rank, many));
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

// Messages of random lengths between all pairs, to oneself too, each rank calling in an order of its own.
TEST(PointToPoint, RandomExchangesInShuffledOrder) {
  const uint64_t seed = std::random_device()();
  run_ranks(4, [seed](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    std::mt19937_64 random(seed), own_order(seed + 1 + rank.rank);
    for (int round = 0; round < 10; ++round) {
      struct Message {
        int peer;
        bool is_sent;
        std::vector<float> data;
        std::unique_ptr<Buffer> buffer;
      };
      std::vector<Message> mine;
      for (int from = 0; from < 4; ++from) {
        for (int to = 0; to < 4; ++to) {
          const std::vector<float> data = pattern(from, to, random() % (random() % 4 == 0 ? 300'000 : 300));
          if (from == rank.rank) mine.push_back({to, true, data, std::make_unique<Buffer>(bytes_of(data))});
          if (to == rank.rank) mine.push_back({from, false, data, std::make_unique<Buffer>(data.size() * 4)});
        }
      }
      std::shuffle(mine.begin(), mine.end(), own_order);
      ASSERT_EQ(ncclGroupStart(), ncclSuccess);
      for (const Message& message : mine) {
        std::byte* at = message.buffer->at();
        ASSERT_EQ(message.is_sent
                      ? ncclSend(at, message.data.size(), ncclFloat32, message.peer, comm, stream)
                      : ncclRecv(at, message.data.size(), ncclFloat32, message.peer, comm, stream),
                  ncclSuccess);
      }
      ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
      stream.synchronize();
      for (const Message& message : mine) {
        EXPECT_EQ(values_in<float>(*message.buffer), message.data) << "seed " << seed;
      }
    }
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

TEST(PointToPoint, MessagesOfOnePairKeepTheirOrder) {
  run_ranks(2, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    std::vector<std::unique_ptr<Buffer>> buffers;
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);
    for (int i = 0; i < 20; ++i) {
      buffers.push_back(std::make_unique<Buffer>(bytes_of(pattern(rank.rank, i, 50'000))));
      ASSERT_EQ(rank.rank == 0 ? ncclSend(buffers[i]->at(), 50'000, ncclFloat32, 1, comm, stream)
                               : ncclRecv(buffers[i]->at(), 50'000, ncclFloat32, 0, comm, stream),
                ncclSuccess);
    }
    ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
    stream.synchronize();
    for (int i = 0; i < 20; ++i) EXPECT_EQ(values_in<float>(*buffers[i]), pattern(0, i, 50'000));
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

TEST(Groups, OfCollectivesAndSendsProgressTogether) {
  run_ranks(2, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    const Buffer sum(bytes_of(std::vector<float>(many, 1))), gathered(many * 2 * 4);
    const Buffer sent(bytes_of(pattern(rank.rank, 0, many))), received(many * 4);
    const int peer = 1 - rank.rank;
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);
    if (rank.rank == 0) {
      ASSERT_EQ(ncclSend(sent.at(), many, ncclFloat32, peer, comm, stream), ncclSuccess);
    }
    ASSERT_EQ(ncclAllReduce(sum.at(), sum.at(), many, ncclFloat32, ncclSum, comm, stream), ncclSuccess);
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);  // nested
    ASSERT_EQ(ncclRecv(received.at(), many, ncclFloat32, peer, comm, stream), ncclSuccess);
    ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
    ASSERT_EQ(ncclAllGather(sent.at(), gathered.at(), many, ncclFloat32, comm, stream), ncclSuccess);
    if (rank.rank == 1) {
      ASSERT_EQ(ncclSend(sent.at(), many, ncclFloat32, peer, comm, stream), ncclSuccess);
    }
    EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);  // nothing is launched yet
    ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
    stream.synchronize();
    EXPECT_EQ(values_in<float>(sum), std::vector<float>(many, 2));
    EXPECT_EQ(values_in<float>(received), pattern(peer, 0, many));
    std::vector<float> both = pattern(0, 0, many);
    const std::vector<float> second = pattern(1, 0, many);
    both.insert(both.end(), second.begin(), second.end());
    EXPECT_EQ(values_in<float>(gathered), both);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

// The ranks call on two communicators in opposite orders, on one stream.
TEST(Groups, OverSeveralCommunicatorsInAnyOrder) {
  run_ranks(2, [](Rank& rank) {
    const ncclComm_t comms[] = {rank.communicator(0), rank.communicator(1)};
    const Stream stream;
    const Buffer buffers[] = {Buffer(bytes_of(std::vector<float>(many, 1))),
                              Buffer(bytes_of(std::vector<float>(many, 3)))};
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);
    for (const int i : {rank.rank, 1 - rank.rank}) {
      ASSERT_EQ(ncclAllReduce(buffers[i].at(), buffers[i].at(), many, ncclFloat32, ncclSum, comms[i], stream),
                ncclSuccess);
    }
    ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
    stream.synchronize();
    EXPECT_EQ(values_in<float>(buffers[0]), std::vector<float>(many, 2));
    EXPECT_EQ(values_in<float>(buffers[1]), std::vector<float>(many, 6));
    for (const ncclComm_t comm : comms) EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

// One group's send and receive on two streams: both streams wait for both.
TEST(Groups, OverSeveralStreamsStartWhenAllAreReadyAndEndTogether) {
  run_ranks(2, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream first, second;
    const int peer = 1 - rank.rank;
    const Buffer sent(bytes_of(pattern(rank.rank, peer, many))), received(many * 4);
    for (int round = 0; round < 5; ++round) {
      ASSERT_EQ(ncclGroupStart(), ncclSuccess);
      ASSERT_EQ(ncclSend(sent.at(), many, ncclFloat32, peer, comm, first), ncclSuccess);
      ASSERT_EQ(ncclRecv(received.at(), many, ncclFloat32, peer, comm, second), ncclSuccess);
      ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
      first.synchronize();  // though the receive was called on the other
      EXPECT_EQ(values_in<float>(received), pattern(peer, rank.rank, many));
    }
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

TEST(Groups, WithAWrongCallLaunchNothing) {
  run_ranks(1, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    const Buffer buffer(bytes_of(std::vector<float>(4, 1)));
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);
    EXPECT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 4, ncclFloat32, ncclSum, comm, stream), ncclSuccess);
    EXPECT_EQ(ncclBroadcast(buffer.at(), buffer.at(), 4, ncclFloat32, 7, comm, stream), ncclInvalidArgument);
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
    EXPECT_STREQ(ncclGetLastError(nullptr), "ncclGroupEnd without ncclGroupStart.");
    EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
    // And the next one is a new group.
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);
    EXPECT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 4, ncclFloat32, ncclSum, comm, stream), ncclSuccess);
    EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

}  // namespace
