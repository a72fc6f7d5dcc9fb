// A server that is killed in the middle of a minibatch, and what the program notices of it: nothing.
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <thread>

#include "proxy/client/jitckpt_proxy.h"
#include "proxy/tests/support.h"
#include "proxy/transport/layout.h"

namespace {

void keep() { ok(static_cast<cudaError_t>(jitckpt_proxy_keep())); }

void kill_server() {
  const pid_t server = jitckpt_proxy_server();
  ASSERT_GT(server, 0);
  ASSERT_EQ(kill(server, SIGKILL), 0);
}

// A minibatch with calls of every kind. Before call number `fatal`, the server is killed.
class Minibatch {
 public:
  explicit Minibatch(int fatal) : fatal_(fatal), state_(1000, 5) {
    ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    ok(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    ok(cudaMallocHost(reinterpret_cast<void**>(&pinned_), 4000));
    ok(cudaMalloc(reinterpret_cast<void**>(&in_front_), 1 << 20));
    ok(cudaMalloc(reinterpret_cast<void**>(&temporary_), 1 << 16));
    ok(cudaFree(in_front_));  // a gap in front of what stays
    keep();
  }
  ~Minibatch() {
    ok(cudaStreamDestroy(stream_));
    ok(cudaEventDestroy(event_));
    ok(cudaFreeHost(pinned_));
    ok(cudaFree(temporary_));
  }
  Minibatch(const Minibatch&) = delete;
  Minibatch& operator=(const Minibatch&) = delete;

  // What the program has seen, in order.
  std::vector<int> run() {
    std::vector<int> seen;
    int *block = nullptr, *second = nullptr;
    cudaEvent_t own = nullptr;
    ncclComm_t alone = nullptr;
    std::vector<int> host(1000, 3);
    call([&] { launch_add(state_.get(), 1, stream_); });
    call([&] { ok(cudaMalloc(reinterpret_cast<void**>(&block), 4000)); });
    call([&] { ok(cudaMemcpyAsync(block, host.data(), 4000, cudaMemcpyHostToDevice, stream_)); });
    host.assign(1000, -1);
    call([&] { launch_add(block + 7, 10, stream_); });
    call([&] { ok(cudaEventRecord(event_, stream_)); });
    call([&] { ok(cudaStreamWaitEvent(nullptr, event_, 0)); });
    call([&] { ok(cudaMemcpyAsync(temporary_, block, 4000, cudaMemcpyDeviceToDevice, nullptr)); });
    call([&] { ok(cudaEventCreate(&own)); });
    call([&] { ok(cudaEventRecord(own, nullptr)); });
    call([&] { ok(cudaEventSynchronize(own)); });
    call([&] { ok(cudaMemcpy(host.data(), temporary_, 4000, cudaMemcpyDeviceToHost)); });
    seen.insert(seen.end(), {host[6], host[7]});
    call([&] { ok(cudaFree(block)); });
    call([&] { ok(cudaMalloc(reinterpret_cast<void**>(&second), 2000)); });
    seen.push_back(second == block);
    call([&] { ok(cudaMemsetAsync(second, 0, 2000, stream_)); });
    pinned_[0] = 20;
    call([&] { ok(cudaMemcpyAsync(second, pinned_, 4, cudaMemcpyHostToDevice, stream_)); });
    call([&] { launch_add(second, 1, stream_); });
    ncclUniqueId id;
    call([&] { ok(ncclGetUniqueId(&id)); });
    call([&] { ok(ncclCommInitRank(&alone, 1, id, 0)); });
    call([&] { ok(ncclAllReduce(second, state_.get() + 1, 1, ncclInt32, ncclSum, alone, stream_)); });
    call([&] { ok(cudaEventDestroy(own)); });
    call([&] { ok(cudaStreamSynchronize(stream_)); });
    pinned_[0] = -1;
    call([&] { ok(cudaMemcpyAsync(pinned_ + 1, state_.get(), 8, cudaMemcpyDeviceToHost, stream_)); });
    call([&] { ok(cudaStreamSynchronize(stream_)); });
    seen.insert(seen.end(), {pinned_[1], pinned_[2]});
    call([&] { ok(ncclCommDestroy(alone)); });
    call([&] { ok(cudaFree(second)); });
    call([&] { launch_add(state_.get(), 100); });
    const auto end = state_.read();
    seen.insert(seen.end(), end.begin(), end.begin() + 3);
    return seen;
  }

  int calls() const { return calls_; }

 private:
  void call(const std::function<void()>& make) {
    if (calls_++ == fatal_) kill_server();
    make();
  }

  int fatal_, calls_ = 0;
  const DeviceInts state_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_ = nullptr;
  int *pinned_ = nullptr, *in_front_ = nullptr, *temporary_ = nullptr;
};

const std::vector<int> undisturbed{3, 13, 1, 6, 21, 106, 21, 5};

// How many answers this thread waits for in a call.
uint64_t asks(const std::function<void()>& call) {
  const uint64_t asked = jitckpt_proxy_answers();
  call();
  return jitckpt_proxy_answers() - asked;
}

// C10d's watchdog asks for each collective, and would have to wake the server for it.
TEST(Recovery, AnEventOfBeforeAnImageIsOverWithoutAskingTheServer) {
  const DeviceInts memory(1000, 5);
  cudaEvent_t before = nullptr, after = nullptr;
  ok(cudaEventCreateWithFlags(&before, cudaEventDisableTiming));
  ok(cudaEventCreateWithFlags(&after, cudaEventDisableTiming));
  keep();
  ok(cudaEventRecord(before, nullptr));
  ok(cudaEventRecord(after, nullptr));
  ok(cudaDeviceSynchronize());
  EXPECT_EQ(asks([&] { ok(cudaEventQuery(before)); }), 1);  // nothing says so but the server
  keep();
  ok(cudaEventRecord(after, nullptr));
  ok(cudaDeviceSynchronize());
  EXPECT_EQ(asks([&] { ok(cudaEventQuery(before)); }), 0);
  EXPECT_EQ(asks([&] { ok(cudaEventQuery(after)); }), 1);  // it was recorded again
  kill_server();
  ok(cudaDeviceSynchronize());
  EXPECT_EQ(asks([&] { ok(cudaEventQuery(before)); }), 1);  // the new device is not as far as the program yet
  keep();
  ok(cudaDeviceSynchronize());
  EXPECT_EQ(asks([&] { ok(cudaEventQuery(before)); }), 0);
  EXPECT_EQ(asks([&] { ok(cudaEventQuery(after)); }), 0);
  ok(cudaEventDestroy(before));
  ok(cudaEventDestroy(after));
}

TEST(Recovery, AServerThatDiesAtAnyCallIsReplaced) {
  testing::internal::CaptureStderr();  // a line for each
  Minibatch without(-1);
  EXPECT_EQ(without.run(), undisturbed);
  for (int fatal = 0; fatal < without.calls(); ++fatal)
    EXPECT_EQ(Minibatch(fatal).run(), undisturbed) << "killed before call " << fatal;
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("was ended by Killed; process"), std::string::npos) << said;
}

// What the program puts into pinned memory when a copy to there is over stays, though that is made again.
TEST(Recovery, PinnedMemoryIsTheProgramsOnceACopyIsOver) {
  testing::internal::CaptureStderr();
  const OwnStream stream;
  const DeviceInts number(1, 5);
  int* pinned = nullptr;
  ok(cudaMallocHost(reinterpret_cast<void**>(&pinned), 4096));
  keep();
  const auto copy = [&](int to) {
    ok(cudaMemcpyAsync(pinned + to, number.get(), sizeof(int), cudaMemcpyDeviceToHost, stream));
  };
  copy(0);
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(std::exchange(pinned[0], 77), 5);
  {
    Gate gate(stream);
    copy(1);
    kill_server();
    EXPECT_EQ(number.read(), std::vector<int>{5});  // the new server has come so far
    gate.open();
  }
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(pinned[0], 77);
  EXPECT_EQ(pinned[1], 5);
  // Into the same place again, without a look at the first of them.
  launch_add(number.get(), 1, stream);
  copy(0);
  kill_server();
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(pinned[0], 6);
  ok(cudaFreeHost(pinned));
  testing::internal::GetCapturedStderr();
}

// A query that has said so is all that keeps the second stream from being first.
TEST(Recovery, WhatTheProgramWasToldIsOverIsOverInTheReplay) {
  testing::internal::CaptureStderr();
  constexpr std::size_t bytes = 32 << 20;
  const OwnStream first, second;
  const DeviceInts number(1, 5), copy(1), other(bytes / sizeof(int));
  cudaEvent_t event = nullptr;
  ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  for (const bool by_event : {true, false}) {
    keep();
    for (int time = 0; time < 10; ++time) ok(cudaMemsetAsync(other.get(), time, bytes, first));
    ok(cudaMemcpyAsync(copy.get(), number.get(), sizeof(int), cudaMemcpyDeviceToDevice, first));
    ok(cudaEventRecord(event, first));
    while ((by_event ? cudaEventQuery(event) : cudaStreamQuery(first)) == cudaErrorNotReady)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    launch_add(number.get(), 1, second);
    ok(cudaStreamSynchronize(second));
    kill_server();
    EXPECT_EQ(copy.read(), std::vector<int>{by_event ? 5 : 6});
    EXPECT_EQ(number.read(), std::vector<int>{by_event ? 6 : 7});
  }
  ok(cudaEventDestroy(event));
  testing::internal::GetCapturedStderr();
}

// A file that other servers write to as well. And until the device has ended a minibatch, events of before
// say nothing of where it is.
TEST(Recovery, AFileOfTheProgramsStaysPinnedMemory) {
  testing::internal::CaptureStderr();
  const OwnStream stream;
  const DeviceInts number(1, 5), other(1, 3);
  const int file = memfd_create("shared", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(file, 4096), 0);
  void* pinned = nullptr;
  ok(static_cast<cudaError_t>(jitckpt_proxy_share(file, 0, 4096, &pinned)));
  int* const copied = static_cast<int*>(pinned);
  for (int minibatch = 0; minibatch < 2; ++minibatch) keep();
  EXPECT_EQ(jitckpt_proxy_stands(), jitckpt_proxy_intact);
  const auto write = [&](uint64_t value) {
    launch_add(number.get(), 1, stream);
    ok(cudaMemcpyAsync(copied + 2, number.get(), sizeof(int), cudaMemcpyDeviceToHost, stream));
    ok(static_cast<cudaError_t>(jitckpt_proxy_write_word(static_cast<uint64_t*>(pinned), value, stream)));
  };
  for (const uint64_t value : {1, 2}) {
    {
      Gate gate(stream);
      write(value);
      kill_server();
      EXPECT_EQ(other.read(), std::vector<int>{3});  // by a new server
      gate.open();
    }
    ok(cudaStreamSynchronize(stream));
    EXPECT_EQ(*static_cast<uint64_t*>(pinned), value);
    EXPECT_EQ(copied[2], 5 + static_cast<int>(value));
    EXPECT_EQ(jitckpt_proxy_stands(), jitckpt_proxy_lost);
    for (int minibatch = 0; minibatch < 2; ++minibatch) keep();
    EXPECT_EQ(jitckpt_proxy_stands(), jitckpt_proxy_intact);
  }
  close(file);
  testing::internal::GetCapturedStderr();
}

// More copies than can be watched: those beyond are the same, only slower.
TEST(Recovery, NoCopyIsTooMany) {
  testing::internal::CaptureStderr();
  const OwnStream stream;
  const DeviceInts number(1, 5);
  int* pinned = nullptr;
  ok(cudaMallocHost(reinterpret_cast<void**>(&pinned), 4096));
  keep();
  for (std::size_t made = 0; made < jitckpt::proxy::copy_flag_count + 3; ++made)
    ok(cudaMemcpyAsync(pinned, number.get(), sizeof(int), cudaMemcpyDeviceToHost, stream));
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(std::exchange(pinned[0], 77), 5);
  kill_server();
  EXPECT_EQ(number.read(stream), std::vector<int>{5});
  EXPECT_EQ(pinned[0], 77);
  for (int minibatch = 0; minibatch < 2; ++minibatch) keep();
  ok(cudaMemcpyAsync(pinned, number.get(), sizeof(int), cudaMemcpyDeviceToHost, stream));
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(pinned[0], 5);
  ok(cudaFreeHost(pinned));
  testing::internal::GetCapturedStderr();
}

// A kernel reads pinned memory that the program overwrites: what it gives in the replay is not what it has
// given. That is noticed in whatever way the program has got it.
TEST(Recovery, AnswersThatDifferInTheReplayAreCounted) {
  testing::internal::CaptureStderr();
  const OwnStream stream;
  const DeviceInts number(1, 5);
  int *pinned = nullptr, *told = nullptr;
  ok(cudaMallocHost(reinterpret_cast<void**>(&pinned), 4096));
  ok(cudaMallocHost(reinterpret_cast<void**>(&told), 4096));
  uint64_t expected = jitckpt_proxy_different_answers();
  for (const bool overwrites : {false, true}) {
    for (const bool to_pinned : {false, true}) {
      keep();
      pinned[0] = 3;
      launch_mix(number.get(), pinned, stream);
      if (to_pinned)
        ok(cudaMemcpyAsync(told, number.get(), sizeof(int), cudaMemcpyDeviceToHost, stream));
      else
        number.read(stream);
      ok(cudaStreamSynchronize(stream));
      if (overwrites) pinned[0] = 4;
      kill_server();
      keep();
      keep();
      EXPECT_EQ(jitckpt_proxy_different_answers(), expected += overwrites ? 1 : 0);
    }
  }
  ok(cudaFreeHost(pinned));
  ok(cudaFreeHost(told));
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("may differ from an undisturbed run's"), std::string::npos) << said;
}

TEST(Recovery, EveryMinibatchStartsFromItsOwnState) {
  testing::internal::CaptureStderr();
  const DeviceInts number(1);
  for (int minibatch = 0; minibatch < 6; ++minibatch) {
    keep();
    launch_add(number.get(), 1);
    if (minibatch % 2 == 1) kill_server();
    launch_add(number.get(), 10);
    EXPECT_EQ(number.read(), std::vector<int>{11 * (minibatch + 1)});
  }
  testing::internal::GetCapturedStderr();
}

// Torch waits for the stream behind each copy of a batch.
TEST(Recovery, NobodyWaitsForAStreamThatHasOnlyCopiesFromTheHostToMake) {
  const DeviceInts numbers(1000);
  const OwnStream stream, other;
  const auto wait = [&] { ok(cudaStreamSynchronize(stream)); };
  std::vector<int> host(1000);
  const auto copy = [&](int value) {
    host.assign(1000, value);
    ok(cudaMemcpyAsync(numbers.get(), host.data(), 4000, cudaMemcpyHostToDevice, stream));
    host.assign(1000, -1);
  };
  keep();
  EXPECT_EQ(asks(wait), 1);
  for (int value = 0; value < 100; ++value) {
    copy(value);
    EXPECT_EQ(asks(wait), 0);
    copy(2 * value);
    EXPECT_EQ(asks(wait), 0);
    launch_add(numbers.get(), 7, other);  // finds the copy made
    std::vector<int> seen = numbers.read(other);
    EXPECT_EQ(seen[0], 2 * value + 7);
    EXPECT_EQ(seen[999], 2 * value);
    EXPECT_EQ(asks(wait), 1);  // there were other calls
  }
  copy(1);
  launch_add(numbers.get(), 1, stream);
  EXPECT_EQ(asks(wait), 1);
  copy(1);
  std::thread([&] { launch_add(numbers.get(), 1, stream); }).join();
  EXPECT_EQ(asks(wait), 1);
  copy(1);
  EXPECT_EQ(asks([&] { ok(cudaStreamSynchronize(other)); }), 1);
  EXPECT_EQ(asks(wait), 1);
  copy(5);
  kill_server();
  EXPECT_EQ(asks(wait), 0);  // nobody knows of it yet
  EXPECT_EQ(numbers.read(stream)[0], 5);
  EXPECT_EQ(asks(wait), 1);
  copy(6);
  EXPECT_EQ(asks(wait), 1);  // the new device has still to come to where the program is
  keep();
  ok(cudaDeviceSynchronize());
  EXPECT_EQ(asks(wait), 1);
  copy(8);
  EXPECT_EQ(asks(wait), 0);
  EXPECT_EQ(numbers.read(stream)[999], 8);
}

// A minibatch begins for the program while the device is in the one before. If the server dies meanwhile, the
// image of the one before serves.
TEST(Recovery, AMinibatchBeginsBeforeItsImageIsMade) {
  testing::internal::CaptureStderr();
  const OwnStream stream;
  const DeviceInts number(1);
  keep();
  for (int minibatch = 0, expected = 0; minibatch < 3; ++minibatch) {
    Gate gate(stream);
    launch_add(number.get(), 1, stream);
    keep();
    launch_add(number.get(), 10, stream);
    kill_server();
    gate.open();
    expected += 11;
    EXPECT_EQ(number.read(stream), std::vector<int>{expected});
    keep();
    launch_add(number.get(), 100, stream);
    kill_server();
    expected += 100;
    EXPECT_EQ(number.read(stream), std::vector<int>{expected});
  }
  testing::internal::GetCapturedStderr();
}

// What the program frees and makes stays in order over the minibatches that are kept, also where the server
// dies while a minibatch is being kept.
TEST(Recovery, AServerThatDiesWhileAMinibatchIsKeptIsReplaced) {
  testing::internal::CaptureStderr();
  const DeviceInts sum(1);
  struct Block {
    int *begin, content;
  };
  std::map<std::size_t, Block> blocks;  // by length
  std::mt19937 random(3);
  int expected = 0;
  for (int minibatch = 0; minibatch < 40; ++minibatch) {
    std::thread killer;
    if (minibatch % 3 == 1) {
      killer = std::thread([after = random() % 3000, server = jitckpt_proxy_server()] {
        std::this_thread::sleep_for(std::chrono::microseconds(after));
        kill(server, SIGKILL);
      });
    }
    keep();
    if (killer.joinable()) killer.join();
    for (std::size_t change = 0; change < 4; ++change) {
      const std::size_t bytes = 512 * (1 + random() % 8);
      if (const auto block = blocks.find(bytes); block != blocks.end()) {
        int content = -1;
        ok(cudaMemcpy(&content, block->second.begin, sizeof content, cudaMemcpyDeviceToHost));
        EXPECT_EQ(content, block->second.content);
        ok(cudaFree(block->second.begin));
        blocks.erase(block);
      } else {
        int* made = nullptr;
        ok(cudaMalloc(reinterpret_cast<void**>(&made), bytes));
        ok(cudaMemset(made, 0, bytes));
        blocks[bytes] = {made, 0};
      }
    }
    for (auto& [bytes, block] : blocks) {
      launch_add(block.begin, static_cast<int>(bytes));
      block.content += static_cast<int>(bytes);
    }
    launch_add(sum.get(), 1);
    ++expected;
    EXPECT_EQ(sum.read(), std::vector<int>{expected});
  }
  for (const auto& [bytes, block] : blocks) ok(cudaFree(block.begin));
  testing::internal::GetCapturedStderr();
}

// An allocator of the program's gives out parts of its memory, and says so.
TEST(Recovery, WhatIsFreeIsInNoImage) {
  testing::internal::CaptureStderr();
  constexpr std::size_t parts = 64, length = 16 * 1024;  // in numbers: longer than gaps that are copied too
  const DeviceInts pool(parts * length, 1);
  const auto address = [&](std::size_t part) {
    return reinterpret_cast<uint64_t>(pool.get() + part * length);
  };
  jitckpt_proxy_free(address(0), parts * length * sizeof(int));
  std::map<std::size_t, int> held;  // what they hold
  std::mt19937 random(5);
  for (int minibatch = 0; minibatch < 30; ++minibatch) {
    for (std::size_t change = 0; change < 8; ++change) {
      const std::size_t part = random() % parts;
      if (held.erase(part) != 0) {
        jitckpt_proxy_free(address(part), length * sizeof(int));
      } else {
        jitckpt_proxy_hold(address(part), length * sizeof(int));
        ok(cudaMemset(pool.get() + part * length, 0, length * sizeof(int)));
        held[part] = 0;
      }
    }
    for (int whole = 0; whole < 2; ++whole) keep();  // so no older image serves
    for (auto& [part, content] : held) launch_add(pool.get() + part * length, content = minibatch + 10);
    for (auto& [part, content] : held) launch_add(pool.get() + (part + 1) * length - 1, content);
    kill_server();
    const std::vector<int> found = pool.read();
    for (std::size_t part = 0; part < parts; ++part) {
      if (!held.contains(part)) {
        EXPECT_NE(found[part * length + 1], 1) << "minibatch " << minibatch;
      }
    }
    for (auto& [part, content] : held) {
      EXPECT_EQ(found[part * length], content);
      EXPECT_EQ(found[(part + 1) * length - 1], content);
      ok(cudaMemset(pool.get() + part * length, 0, length * sizeof(int)));
    }
  }
  jitckpt_proxy_hold(address(0), parts * length * sizeof(int));
  testing::internal::GetCapturedStderr();
}

// A framework fills part of a buffer in each minibatch before it reads it: the rest may be of any size.
TEST(Recovery, WhatNoMinibatchNeedsIsInNoImage) {
  testing::internal::CaptureStderr();
  constexpr std::size_t length = 256 * 1024, whole = length * sizeof(int);
  const DeviceInts state(length, 1), buffer(length, 2);
  keep();
  const uint64_t with_buffer = jitckpt_proxy_image_bytes();
  const jitckpt_proxy_place place{reinterpret_cast<uint64_t>(buffer.get()), whole};
  jitckpt_proxy_leave_out(&place, 1);
  for (int minibatch = 0; minibatch < 4; ++minibatch) {
    for (int twice = 0; twice < 2; ++twice) keep();  // so no older image serves
    EXPECT_EQ(jitckpt_proxy_image_bytes(), with_buffer - whole);
    ok(cudaMemset(buffer.get(), 0, 4));
    launch_add(buffer.get(), 7);
    ok(cudaMemcpy(state.get() + minibatch, buffer.get(), 4, cudaMemcpyDeviceToDevice));
    kill_server();
    const std::vector<int> found = state.read();
    EXPECT_EQ(found[static_cast<std::size_t>(minibatch)], 7);
    EXPECT_EQ(found[length - 1], 1);
    EXPECT_EQ(buffer.read()[0], 7);
    EXPECT_NE(buffer.read()[length - 1], 2);
  }
  jitckpt_proxy_leave_out(nullptr, 0);
  keep();
  EXPECT_EQ(jitckpt_proxy_image_bytes(), with_buffer);
  testing::internal::GetCapturedStderr();
}

// Torch's autograd threads, and programs' own, go on while a minibatch is kept.
TEST(Recovery, AnotherThreadWritesWhileAMinibatchIsKept) {
  testing::internal::CaptureStderr();
  constexpr std::size_t parts = 100, length = 16 * 1024;
  const DeviceInts pool(parts * length);
  const auto address = [&](std::size_t part) {
    return reinterpret_cast<uint64_t>(pool.get() + part * length);
  };
  jitckpt_proxy_free(address(0), parts * length * sizeof(int));
  for (int round = 1; round <= 4; ++round) {
    std::thread other([&] {
      const OwnStream stream;
      for (std::size_t part = 0; part < parts; ++part) {
        jitckpt_proxy_hold(address(part), length * sizeof(int));
        ok(cudaMemsetAsync(pool.get() + part * length, 0, length * sizeof(int), stream));
        launch_add(pool.get() + part * length, round, stream);
      }
      ok(cudaStreamSynchronize(stream));
    });
    for (int time = 0; time < 3; ++time) keep();
    other.join();
    kill_server();
    const std::vector<int> found = pool.read();
    for (std::size_t part = 0; part < parts; ++part) EXPECT_EQ(found[part * length], round) << part;
    jitckpt_proxy_free(address(0), parts * length * sizeof(int));
  }
  jitckpt_proxy_hold(address(0), parts * length * sizeof(int));
  testing::internal::GetCapturedStderr();
}

// The end of memory, and what takes its place, is nobody's news but the proxy's.
TEST(Recovery, NewMemoryIsHeld) {
  testing::internal::CaptureStderr();
  int* before = nullptr;
  {
    const DeviceInts gone(1 << 20, 1);
    before = gone.get();
    jitckpt_proxy_free(reinterpret_cast<uint64_t>(before), 4 << 20);
  }
  const DeviceInts made(1 << 20, 3);
  ASSERT_EQ(made.get(), before);
  keep();
  kill_server();
  EXPECT_EQ(made.read(), std::vector<int>(1 << 20, 3));
  testing::internal::GetCapturedStderr();
}

TEST(Recovery, ReductionsKeepTheirNumbers) {
  testing::internal::CaptureStderr();
  const OwnStream stream;
  const DeviceInts number(1, 3);
  ncclUniqueId id;
  ok(ncclGetUniqueId(&id));
  ncclComm_t alone = nullptr;
  ok(ncclCommInitRank(&alone, 1, id, 0));
  const auto make = [&](int factor) {
    ncclRedOp_t made = ncclSum;
    ok(ncclRedOpCreatePreMulSum(&made, &factor, ncclInt32, ncclScalarHostImmediate, alone));
    return made;
  };
  ok(ncclRedOpDestroy(make(7), alone));
  const ncclRedOp_t kept = make(2);
  keep();
  const ncclRedOp_t made = make(5);
  for (const ncclRedOp_t reduction : {kept, made})
    ok(ncclAllReduce(number.get(), number.get(), 1, ncclInt32, reduction, alone, stream));
  kill_server();
  EXPECT_EQ(number.read(stream), std::vector<int>{30});
  ok(ncclRedOpDestroy(made, alone));
  kill_server();
  ok(ncclAllReduce(number.get(), number.get(), 1, ncclInt32, kept, alone, stream));
  EXPECT_EQ(number.read(stream), std::vector<int>{60});
  ok(ncclCommDestroy(alone));
  testing::internal::GetCapturedStderr();
}

TEST(Recovery, MemoryThatIsRegisteredWithACommunicatorIsAgain) {
  testing::internal::CaptureStderr();
  const DeviceInts number(1, 3);
  ncclUniqueId id;
  ok(ncclGetUniqueId(&id));
  ncclComm_t alone = nullptr;
  ok(ncclCommInitRank(&alone, 1, id, 0));
  const auto make = [&] {
    void* made = nullptr;
    ok(ncclCommRegister(alone, number.get(), sizeof(int), &made));
    EXPECT_NE(made, nullptr);
    return made;
  };
  void* const gone = make();
  ok(ncclCommDeregister(alone, gone));
  EXPECT_EQ(ncclCommDeregister(alone, gone), ncclInvalidArgument);
  void* const before = make();
  keep();
  void* const behind = make();
  kill_server();
  ok(ncclCommDeregister(alone, before));
  EXPECT_EQ(ncclCommDeregister(alone, before), ncclInvalidArgument);
  kill_server();
  ok(ncclCommDeregister(alone, behind));
  // What is registered ends with its communicator: then no server makes it anew.
  void* const last = make();
  keep();
  ok(ncclCommDestroy(alone));
  EXPECT_EQ(ncclCommDeregister(alone, last), ncclInvalidArgument);
  keep();
  keep();
  kill_server();
  EXPECT_EQ(number.read(), std::vector<int>{3});
  EXPECT_EQ(ncclCommRegister(alone, number.get(), sizeof(int), nullptr), ncclInvalidArgument);
  testing::internal::GetCapturedStderr();
}

TEST(Recovery, TheTimeBetweenEventsOfBeforeIsNoError) {
  testing::internal::CaptureStderr();
  const DeviceInts number(1);
  cudaEvent_t begin = nullptr, end = nullptr;
  ok(cudaEventCreate(&begin));
  ok(cudaEventCreate(&end));
  ok(cudaEventRecord(begin, nullptr));
  ok(cudaEventRecord(end, nullptr));
  ok(cudaDeviceSynchronize());
  keep();
  kill_server();
  float milliseconds = -1;
  ok(cudaEventElapsedTime(&milliseconds, begin, end));
  EXPECT_GE(milliseconds, 0);
  ok(cudaEventDestroy(begin));
  ok(cudaEventDestroy(end));
  testing::internal::GetCapturedStderr();
}

TEST(Recovery, AThreadThatWaitsDoesNotNotice) {
  testing::internal::CaptureStderr();
  const OwnStream stream;
  const DeviceInts number(1);
  keep();
  {
    Gate gate(stream);
    launch_add(number.get(), 1, stream);
    std::thread waiting([&] { ok(cudaStreamSynchronize(stream)); });
    std::thread other([&] {
      for (int round = 0; round < 50; ++round) {
        const cudaError_t state = cudaStreamQuery(stream);
        EXPECT_TRUE(state == cudaErrorNotReady || state == cudaSuccess) << state;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    kill_server();
    other.join();
    gate.open();
    waiting.join();
  }
  EXPECT_EQ(number.read(stream), std::vector<int>{1});
  testing::internal::GetCapturedStderr();
}

TEST(Recovery, ACommunicatorWithOthersIsRefused) {
  ncclUniqueId id;
  ok(ncclGetUniqueId(&id));
  Ended other{-1, ""};
  std::thread process([&] { other = run_alone("Alone.JoinsTheOther", {"PROXY_TEST_ID=" + hex(id)}); });
  ncclComm_t both = nullptr;
  ok(ncclCommInitRank(&both, 2, id, 0));
  EXPECT_EQ(jitckpt_proxy_keep(), cudaErrorNotSupported);
  EXPECT_NE(std::string(cudaGetErrorString(cudaErrorNotSupported)).find("joins it to other ranks"),
            std::string::npos);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotSupported);
  ok(ncclCommDestroy(both));
  process.join();
  EXPECT_EQ(other.status, 0) << other.output;
  keep();
}

TEST(Alone, JoinsTheOther) {
  const char* const id = std::getenv("PROXY_TEST_ID");
  if (!alone() || !id) GTEST_SKIP() << "only for other tests";
  ok(cudaSetDevice(1));
  ncclComm_t both = nullptr;
  ok(ncclCommInitRank(&both, 2, id_of(id), 1));
  ok(ncclCommDestroy(both));
}

TEST(Alone, DiesOfTheSameThreeTimes) {
  if (!alone()) GTEST_SKIP() << "only for other tests";
  const DeviceInts number(1);
  keep();
  for (int failure = 0; failure < 2; ++failure) {
    kill_server();
    EXPECT_EQ(number.read(), std::vector<int>{0});
  }
  kill_server();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorDevicesUnavailable);
  std::_Exit(testing::Test::HasFailure() ? 1 : 0);
}

TEST(Recovery, WhatFailsAgainAndAgainIsNotRetriedForEver) {
  const Ended ended = run_alone("Alone.DiesOfTheSameThreeTimes");
  EXPECT_EQ(ended.status, 0) << ended.output;
}

TEST(Alone, OutgrowsTheLog) {
  if (!alone()) GTEST_SKIP() << "only for other tests";
  const DeviceInts number(1);
  for (int minibatch = 1; minibatch <= 3; ++minibatch) {
    keep();
    for (int launch = 0; launch < 20000; ++launch) launch_add(number.get(), 1);
    EXPECT_EQ(number.read(), std::vector<int>{20000 * minibatch});
  }
  keep();
  kill_server();  // protected again
  launch_add(number.get(), 1);
  EXPECT_EQ(number.read(), std::vector<int>{60001});
}

// What lies in the log's memory from earlier is no part of a path, however long that is.
TEST(Alone, FindsKernelsOfAnyPath) {
  if (!alone()) GTEST_SKIP() << "only for other tests";
  const std::vector<unsigned char> earlier(1000, 'x');
  unsigned char* device = nullptr;
  ok(cudaMalloc(reinterpret_cast<void**>(&device), earlier.size()));
  for (int copy = 0; copy < 1000; ++copy)
    ok(cudaMemcpyAsync(device, earlier.data(), earlier.size(), cudaMemcpyHostToDevice, nullptr));
  ok(cudaDeviceSynchronize());
  Dl_info library;
  ASSERT_NE(dladdr(kernels::add(), &library), 0);
  std::string folder = std::filesystem::temp_directory_path() / "jitckpt-kernels-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  DeviceInts number(1);
  for (int length = 1; length <= 16; ++length) {
    const std::string copy = folder + "/" + std::string(length, 'k');
    std::filesystem::copy_file(library.dli_fname, copy);
    void* const handle = dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(handle, nullptr) << dlerror();
    const auto add = reinterpret_cast<const void* (*)()>(dlsym(handle, "_ZN7kernels3addEv"));
    ASSERT_NE(add, nullptr);
    int *to = number.get(), amount = 1;
    void* arguments[] = {&to, &amount};
    ok(cudaLaunchKernel(add(), dim3(1), dim3(1), arguments, 0, nullptr));
    EXPECT_EQ(number.read(), std::vector<int>{length});
  }
  std::filesystem::remove_all(folder);
}

TEST(Recovery, LibrariesAreFoundInAnOldLog) {
  const Ended ended = run_alone("Alone.FindsKernelsOfAnyPath",
                                {"JITCKPT_PROXY_SEGMENT_BYTES=262144", "JITCKPT_PROXY_LOG_BYTES=786432"});
  EXPECT_EQ(ended.status, 0) << ended.output;
}

// The client waits for room in the log when it finds the server dead.
TEST(Alone, FillsTheLogOfADeadServer) {
  if (!alone()) GTEST_SKIP() << "only for other tests";
  const DeviceInts number(1);
  launch_add(number.get(), 1);
  keep();
  kill_server();
  for (int launch = 0; launch < 20000; ++launch) launch_add(number.get(), 1);
  EXPECT_EQ(number.read(), std::vector<int>{20001});
}

TEST(Recovery, AClientThatWaitsForRoomFindsTheServerDead) {
  const Ended ended = run_alone("Alone.FillsTheLogOfADeadServer",
                                {"JITCKPT_PROXY_SEGMENT_BYTES=262144", "JITCKPT_PROXY_LOG_BYTES=2097152"});
  EXPECT_EQ(ended.status, 0) << ended.output;
  EXPECT_NE(ended.output.find("takes over"), std::string::npos) << ended.output;
}

TEST(Recovery, AMinibatchThatOutgrowsTheLogGoesOnUnprotected) {
  const Ended ended = run_alone("Alone.OutgrowsTheLog", {"RANK=3", "JITCKPT_PROXY_SEGMENT_BYTES=262144",
                                                         "JITCKPT_PROXY_LOG_BYTES=786432"});
  EXPECT_EQ(ended.status, 0) << ended.output;
  const std::string told =
      "jitckpt: rank 3: the calls since optimizer step 1 are more than the device proxy's log holds";
  EXPECT_NE(ended.output.find(told), std::string::npos) << ended.output;
  EXPECT_NE(ended.output.find("raise JITCKPT_PROXY_LOG_BYTES"), std::string::npos) << ended.output;
  EXPECT_EQ(ended.output.find("is said once"), ended.output.rfind("is said once")) << ended.output;
}

TEST(Alone, LosesItsServerWhenTheLogIsOutgrown) {
  if (!alone()) GTEST_SKIP() << "only for other tests";
  const DeviceInts number(1);
  keep();
  for (int launch = 0; launch < 20000; ++launch) launch_add(number.get(), 1);
  ok(cudaDeviceSynchronize());
  kill_server();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorDevicesUnavailable);
}

TEST(Recovery, AFailureNamesTheLogThatWasOutgrown) {
  const Ended ended = run_alone("Alone.LosesItsServerWhenTheLogIsOutgrown",
                                {"JITCKPT_PROXY_SEGMENT_BYTES=262144", "JITCKPT_PROXY_LOG_BYTES=786432"});
  EXPECT_EQ(ended.status, 0) << ended.output;
  EXPECT_NE(ended.output.find("was ended by Killed, and the calls since optimizer step 1 are more than"),
            std::string::npos)
      << ended.output;
}

}  // namespace
