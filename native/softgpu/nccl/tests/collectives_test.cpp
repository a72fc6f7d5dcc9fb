// Every collective between real processes, against the reference, bit for bit.
#include <gtest/gtest.h>
#include <nccl.h>

#include <algorithm>
#include <memory>
#include <ostream>
#include <random>
#include <string>

#include "softgpu/nccl/tests/rank_processes.h"
#include "softgpu/nccl/tests/reference.h"

namespace {

enum Kind { all_reduce, reduce, reduce_scatter, broadcast, all_gather, all_to_all, gather, scatter, kinds };

// As an operation: the sum of what each rank sends times a scalar of its own.
constexpr auto pre_multiplied = static_cast<ncclRedOp_t>(ncclNumOps);

struct Case {
  Kind kind;
  ncclDataType_t type;
  ncclRedOp_t operation;
  size_t count;
  int root;
  bool in_place;
  uint64_t seed;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "kind " << c.kind << " type " << c.type << " operation " << c.operation << " count "
             << c.count << " root " << c.root << " in place " << c.in_place << " seed " << c.seed;
}

Bytes slice(const Bytes& bytes, size_t begin, size_t size) {
  return {bytes.begin() + begin, bytes.begin() + begin + size};
}
void append(Bytes& bytes, const Bytes& more) { bytes.insert(bytes.end(), more.begin(), more.end()); }

// What the ranks send, and what this rank has to get; empty if it gets nothing.
std::vector<Bytes> inputs_of(const Case& c, int ranks) {
  const bool has_blocks = c.kind == reduce_scatter || c.kind == all_to_all || c.kind == scatter;
  std::vector<Bytes> inputs;
  for (int rank = 0; rank < ranks; ++rank) {
    inputs.push_back(make_input(c.type, has_blocks ? c.count * ranks : c.count, c.seed + rank));
  }
  return inputs;
}

Bytes expected(const Case& c, const std::vector<Bytes>& inputs, int rank) {
  const size_t block = c.count * bytes_per_element(c.type);
  const bool is_root = rank == c.root;
  Bytes result;
  switch (c.kind) {
    case all_reduce:
      return reduce_in_order(c.type, c.operation, inputs);
    case reduce:
      return is_root ? reduce_in_order(c.type, c.operation, inputs) : result;
    case reduce_scatter:
      return slice(reduce_in_order(c.type, c.operation, inputs), rank * block, block);
    case broadcast:
      return inputs[c.root];
    case scatter:
      return slice(inputs[c.root], rank * block, block);
    case gather:
      if (!is_root) return result;
      [[fallthrough]];
    case all_gather:
      for (const Bytes& input : inputs) append(result, input);
      return result;
    default:
      for (const Bytes& input : inputs) append(result, slice(input, rank * block, block));
      return result;
  }
}

ncclResult_t call(const Case& c, const void* send, void* receive, ncclComm_t comm, cudaStream_t stream) {
  switch (c.kind) {
    case all_reduce:
      return ncclAllReduce(send, receive, c.count, c.type, c.operation, comm, stream);
    case reduce:
      return ncclReduce(send, receive, c.count, c.type, c.operation, c.root, comm, stream);
    case reduce_scatter:
      return ncclReduceScatter(send, receive, c.count, c.type, c.operation, comm, stream);
    case broadcast:
      return ncclBroadcast(send, receive, c.count, c.type, c.root, comm, stream);
    case all_gather:
      return ncclAllGather(send, receive, c.count, c.type, comm, stream);
    case all_to_all:
      return ncclAlltoAll(send, receive, c.count, c.type, comm, stream);
    case gather:
      return ncclGather(send, receive, c.count, c.type, c.root, comm, stream);
    default:
      return ncclScatter(send, receive, c.count, c.type, c.root, comm, stream);
  }
}

// Where the other of the two buffers lies in the larger one for a call in place, in blocks.
size_t send_block(const Case& c, int rank) { return c.kind == all_gather || c.kind == gather ? rank : 0; }
size_t receive_block(const Case& c, int rank) {
  return c.kind == reduce_scatter || c.kind == scatter ? rank : 0;
}

// One block more than ranks, so that what is written behind the end is seen.
size_t room_for(size_t count, int ranks, size_t element) { return (ranks + 1) * count * element + 64; }

// In buffers of the same size, with room for it.
void check(const Case& c, const Rank& rank, ncclComm_t comm, cudaStream_t stream, Buffer& send,
           Buffer& receive) {
  const size_t block = c.count * bytes_per_element(c.type);
  std::vector<Bytes> inputs = inputs_of(c, rank.ranks);
  const Bytes input = inputs[rank.rank];
  const auto scalar_of = [&](int of) { return make_input(c.type, 1, c.seed + 50 + of); };
  Case called = c, reduced = c;
  if (c.operation == pre_multiplied) {
    for (int i = 0; i < rank.ranks; ++i) inputs[i] = multiplied(c.type, inputs[i], scalar_of(i).data());
    ASSERT_EQ(ncclRedOpCreatePreMulSum(&called.operation, scalar_of(rank.rank).data(), c.type,
                                       ncclScalarHostImmediate, comm),
              ncclSuccess);
    reduced.operation = ncclSum;
  }
  const Bytes wanted = expected(reduced, inputs, rank.rank);
  const Bytes untouched(receive.bytes(), std::byte{0xa5});

  receive.upload(untouched);
  const size_t sent_at = c.in_place ? send_block(c, rank.rank) * block : 0;
  const size_t received_at = c.in_place ? receive_block(c, rank.rank) * block : 0;
  Buffer& source = c.in_place ? receive : send;
  Bytes before = untouched;
  std::copy(input.begin(), input.end(), before.begin() + sent_at);
  source.upload(before);

  ASSERT_EQ(call(called, source.at(sent_at), receive.at(received_at), comm, stream), ncclSuccess)
      << c << ": " << ncclGetLastError(comm);
  if (c.operation == pre_multiplied) {
    ASSERT_EQ(ncclRedOpDestroy(called.operation, comm), ncclSuccess);
  }
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);

  Bytes after = c.in_place ? before : untouched;
  std::copy(wanted.begin(), wanted.end(), after.begin() + received_at);
  ASSERT_EQ(receive.download(), after) << c << " on rank " << rank.rank;
}

class Collectives : public testing::TestWithParam<int> {};
class AllCollectives : public testing::TestWithParam<int> {};

TEST_P(AllCollectives, OfEveryTypeAndReductionEqualTheReference) {
  run_ranks(GetParam(), [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    uint64_t number = 0;
    const size_t most = rank.ranks > 2 ? 30 : 200;
    Buffer send(room_for(most, rank.ranks, 8)), receive(room_for(most, rank.ranks, 8));
    const int step = rank.ranks > 5 ? 6 : 1;  // so many processes take their time: bytes and float32
    for (int type = step / 6; type < ncclNumTypes; type += step) {
      for (int kind = 0; kind < kinds; ++kind) {
        const int operations = kind <= reduce_scatter ? pre_multiplied + 1 : 1;
        for (int operation = 0; operation < operations; ++operation) {
          for (const bool in_place : {false, true}) {
            if (in_place && kind == all_to_all) continue;  // NCCL has none
            ++number;
            const Case c{static_cast<Kind>(kind),
                         static_cast<ncclDataType_t>(type),
                         static_cast<ncclRedOp_t>(operation),
                         1 + number * 37 % most,
                         static_cast<int>(number % rank.ranks),
                         in_place,
                         number * 100};
            ASSERT_NO_FATAL_FAILURE(check(c, rank, comm, stream, send, receive));
          }
        }
      }
    }
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

// Counts from none to several chunks, so that pieces and their borders fall everywhere.
TEST_P(Collectives, OfRandomCountsEqualTheReference) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  run_ranks(GetParam(), [seed](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    std::mt19937_64 random(seed);
    for (int i = 0; i < 20; ++i) {
      Case c;
      c.kind = static_cast<Kind>(random() % kinds);
      c.type = static_cast<ncclDataType_t>(random() % ncclNumTypes);
      c.operation = static_cast<ncclRedOp_t>(c.kind <= reduce_scatter ? random() % (pre_multiplied + 1) : 0);
      const bool has_blocks = c.kind == reduce_scatter || c.kind == all_to_all || c.kind == scatter;
      const size_t chunks = has_blocks ? 200'000 / rank.ranks : 100'000;
      const size_t largest[] = {3, 100, 2000, 5000, chunks};
      c.count = random() % largest[i % 5];
      c.root = static_cast<int>(random() % rank.ranks);
      c.in_place = random() % 2 == 0 && c.kind != all_to_all;
      c.seed = random();
      const size_t room = room_for(c.count, rank.ranks, bytes_per_element(c.type));
      Buffer send(room), receive(room);
      ASSERT_NO_FATAL_FAILURE(check(c, rank, comm, stream, send, receive)) << "seed " << seed;
    }
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Collectives, testing::Values(1, 2, 3, 5, 8));
INSTANTIATE_TEST_SUITE_P(Ranks, AllCollectives, testing::Values(1, 2, 3, 5, 16));

TEST(Collective, BcastIsABroadcastInPlace) {
  run_ranks(3, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    const Buffer buffer(bytes_of(std::vector<int>(10, rank.rank)));
    ASSERT_EQ(ncclBcast(buffer.at(), 10, ncclInt32, 2, comm, stream), ncclSuccess);
    stream.synchronize();
    EXPECT_EQ(values_in<int>(buffer), std::vector<int>(10, 2));
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

// 16 numbers fill a cache line, and so the part of each rank.
TEST(Collective, AnAllReduceMayAddInTheOrderOfARing) {
  run_ranks(3, [](Rank& rank) {
    ASSERT_EQ(setenv("SOFTGPU_REDUCTION", "ring", 1), 0);
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    const float own[] = {1e8f, -1e8f, 1.0f};
    const Buffer buffer(bytes_of(std::vector<float>(48, own[rank.rank])));
    ASSERT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 48, ncclFloat32, ncclSum, comm, stream), ncclSuccess);
    stream.synchronize();
    std::vector<float> sums(48, 0.0f);  // -1e8 + 1, or 1 + 1e8, is rounded first
    std::fill(sums.begin() + 32, sums.end(), 1.0f);
    EXPECT_EQ(values_in<float>(buffer), sums);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

TEST(Collective, AnUnknownOrderOfReductionIsRefused) {
  run_ranks(1, [](Rank& rank) {
    ASSERT_EQ(setenv("SOFTGPU_REDUCTION", "tree", 1), 0);
    ncclUniqueId id;
    ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    ncclComm_t comm = nullptr;
    EXPECT_EQ(ncclCommInitRank(&comm, rank.ranks, id, rank.rank), ncclInvalidArgument);
    EXPECT_STREQ(ncclGetLastError(nullptr), "SOFTGPU_REDUCTION is 'tree'; set it to ranks or ring");
  });
}

// Each rank's inputs times its own scalar, rounded before they are added.
TEST(Collective, PreMultipliedSums) {
  run_ranks(3, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    for (const ncclDataType_t type : {ncclFloat32, ncclBfloat16, ncclFloat16, ncclInt32, ncclFloat64}) {
      for (const Kind kind : {all_reduce, reduce, reduce_scatter}) {
        const Case c{kind, type, ncclSum, 3000, 1, false, 5};
        std::vector<Bytes> inputs = inputs_of(c, rank.ranks);
        const Bytes input = inputs[rank.rank];
        std::vector<Bytes> scalars;
        for (int i = 0; i < rank.ranks; ++i) {
          scalars.push_back(make_input(type, 1, 1000 + i));
          inputs[i] = multiplied(type, inputs[i], scalars[i].data());
        }
        const Bytes wanted = expected(c, inputs, rank.rank);

        const bool on_device = kind != reduce;
        const Buffer scalar(scalars[rank.rank]);
        ncclRedOp_t operation;
        ASSERT_EQ(
            ncclRedOpCreatePreMulSum(&operation, on_device ? scalar.at() : scalars[rank.rank].data(), type,
                                     on_device ? ncclScalarDevice : ncclScalarHostImmediate, comm),
            ncclSuccess);
        Case scaled = c;
        scaled.operation = operation;
        const Buffer send(input), receive(input.size());
        ASSERT_EQ(call(scaled, send.at(), receive.at(), comm, stream), ncclSuccess) << ncclGetLastError(comm);
        ASSERT_EQ(ncclRedOpDestroy(operation, comm), ncclSuccess);  // allowed before it has run
        stream.synchronize();
        Bytes result = receive.download();
        result.resize(wanted.size());
        EXPECT_EQ(result, wanted) << c;
      }
    }
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

TEST(Collective, OnOneStreamRunInItsOrderAndReturnAtOnce) {
  run_ranks(2, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    const Buffer buffer(bytes_of(std::vector<float>(100'000, 1)));
    // Rank 1 comes late: rank 0 has all its calls behind it by then, though none can finish.
    if (rank.rank == 1) rank.wait_for(0);
    for (int i = 0; i < 10; ++i) {
      ASSERT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 100'000, ncclFloat32, ncclSum, comm, stream),
                ncclSuccess);
    }
    if (rank.rank == 0) {
      EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
      rank.set(0);
    }
    stream.synchronize();
    EXPECT_EQ(values_in<float>(buffer), std::vector<float>(100'000, 1024));
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

// As with NCCL: one communicator's collectives run one after the other, whatever streams they are on.
TEST(Collective, OfOneCommunicatorOnSeveralStreams) {
  run_ranks(3, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream streams[3];
    std::vector<std::unique_ptr<Buffer>> buffers;
    for (int i = 0; i < 30; ++i) {
      buffers.push_back(std::make_unique<Buffer>(bytes_of(std::vector<int>(1000 + i, rank.rank + i))));
      // Each rank takes other streams.
      ASSERT_EQ(ncclAllReduce(buffers[i]->at(), buffers[i]->at(), 1000 + i, ncclInt32, ncclSum, comm,
                              streams[(i * (rank.rank + 1)) % 3]),
                ncclSuccess);
    }
    for (const Stream& stream : streams) stream.synchronize();
    for (int i = 0; i < 30; ++i)
      EXPECT_EQ(values_in<int>(*buffers[i]), std::vector<int>(1000 + i, 3 + 3 * i));
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

TEST(Collective, OnTheNullStream) {
  run_ranks(2, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Buffer buffer(bytes_of(std::vector<float>{1, 2}));
    ASSERT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 2, ncclFloat32, ncclSum, comm, nullptr), ncclSuccess);
    ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
    EXPECT_EQ(values_in<float>(buffer), (std::vector<float>{2, 4}));
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

}  // namespace
