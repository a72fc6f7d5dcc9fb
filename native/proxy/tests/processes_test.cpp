// The server as a process, and what becomes of the client without it.
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <sstream>
#include <thread>

#include "proxy/client/jitckpt_proxy.h"
#include "proxy/tests/support.h"
#include "proxy/transport/cores.h"
#include "proxy/transport/layout.h"
#include "proxy/transport/log_reader.h"
#include "proxy_calls.h"

namespace {

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(Processes, TheDeviceIsTheServersAlone) {
  const DeviceInts number(1);
  ASSERT_NE(find_server(), 0);
  EXPECT_EQ(text_of("/proc/self/maps").find("libsoftgpu.so"), std::string::npos);
  EXPECT_EQ(text_of("/proc/self/maps").find("memfd:softgpu"), std::string::npos);
  const std::string server = text_of("/proc/" + std::to_string(find_server()) + "/maps");
  EXPECT_NE(server.find("libsoftgpu.so"), std::string::npos);
  EXPECT_NE(server.find("memfd:jitckpt-pinned"), std::string::npos);
}

TEST(Alone, WritesItsServersCores) {
  if (!alone()) GTEST_SKIP() << "only for other tests";
  const DeviceInts number(1);
  const std::string status = text_of("/proc/" + std::to_string(find_server()) + "/status");
  const std::size_t line = status.find("Cpus_allowed_list:");
  std::printf("%s", status.substr(line, status.find('\n', line) + 1 - line).c_str());
}

TEST(Processes, AServerStaysOnOneCoreWhereTheyAreScarce) {
  const std::vector<int> cores = jitckpt::proxy::allowed_cores();
  const auto run = [&](const char* wanted, std::size_t rank) {
    return run_alone("Alone.WritesItsServersCores",
                     {"LOCAL_WORLD_SIZE=" + std::to_string(cores.size()),
                      "LOCAL_RANK=" + std::to_string(rank), std::string("JITCKPT_PROXY_ONE_CORE=") + wanted})
        .output;
  };
  for (std::size_t rank = 0; rank < std::min<std::size_t>(cores.size(), 2); ++rank) {
    const std::string one = "Cpus_allowed_list:\t" + std::to_string(cores[rank]) + "\n";
    EXPECT_NE(run("1", rank).find(one), std::string::npos) << rank;
    if (cores.size() > 1) {
      EXPECT_EQ(run("0", rank).find(one), std::string::npos) << rank;
    }
  }
}

TEST(Alone, EndsWithAWatchdog) {
  if (!alone()) GTEST_SKIP() << "only for other tests";
  static ncclComm_t communicator = nullptr;
  // Runs after the device proxy has ended, whose turn is set when the device is first used.
  std::atexit([] {
    ncclResult_t state = ncclInternalError;
    const ncclResult_t asked = ncclCommGetAsyncError(communicator, &state);
    std::printf("asked %d, state %d, stream %d\n", asked, state, cudaStreamQuery(nullptr));
  });
  ncclUniqueId id{};
  ok(ncclGetUniqueId(&id));
  ok(ncclCommInitRank(&communicator, 1, id, 0));
}

TEST(Processes, AQueryAtTheEndOfTheProcessFindsNoFailure) {
  const Ended ended = run_alone("Alone.EndsWithAWatchdog");
  EXPECT_EQ(ended.status, 0) << ended.output;
  EXPECT_NE(ended.output.find("asked 0, state 0, stream 600"), std::string::npos) << ended.output;
}

TEST(Processes, AForkedChildHasNoDevice) {
  const DeviceInts number(1, 4);
  const pid_t child = fork();
  if (child == 0) {
    void* memory = nullptr;
    _exit(cudaMalloc(&memory, 8) == cudaErrorInitializationError ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(number.read(), std::vector<int>{4});
}

TEST(Processes, SignalsToTheGroupAreNotForTheServer) {
  const DeviceInts number(1, 4);
  kill(find_server(), SIGINT);
  kill(find_server(), SIGTERM);
  EXPECT_EQ(number.read(), std::vector<int>{4});
}

// Of a process of its own, for the tests below.
TEST(Alone, WritesItsServerAndEnds) {
  if (!alone()) GTEST_SKIP() << "only for other tests";
  const DeviceInts number(1);
  std::printf("server %d\n", find_server());
  std::fflush(stdout);
  if (std::getenv("PROXY_TEST_ABORT")) raise(SIGKILL);
}

TEST(Alone, LosesItsServer) {
  if (!alone()) GTEST_SKIP() << "only for other tests";
  const OwnStream stream;
  Gate gate(stream);
  std::thread killer([server = find_server()] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    kill(server, SIGKILL);
  });
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorDevicesUnavailable);
  killer.join();
  EXPECT_NE(std::string(cudaGetErrorString(cudaErrorDevicesUnavailable)).find("was ended by Killed"),
            std::string::npos);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, 8), cudaErrorDevicesUnavailable);
  int version = 0;
  EXPECT_EQ(ncclGetVersion(&version), ncclSystemError);
  std::_Exit(testing::Test::HasFailure() ? 1 : 0);  // without waiting for the gate, which is nowhere any more
}

// The log as it lies in this process's memory.
jitckpt::proxy::Log log_of_this_process() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:jitckpt-log") == std::string::npos) continue;
    std::size_t end = 0;
    auto* const begin = reinterpret_cast<std::byte*>(std::stoull(line, &end, 16));
    const std::size_t bytes =
        std::stoull(line.substr(end + 1), nullptr, 16) - reinterpret_cast<std::size_t>(begin);
    return {begin, jitckpt::proxy::read_geometry(begin, bytes)};
  }
  throw std::runtime_error("there is no log");
}

// The newest launch has another length than it had.
void damage_newest_launch() {
  const jitckpt::proxy::Log log = log_of_this_process();
  jitckpt::proxy::RecordHeader* newest = nullptr;
  for (std::size_t segment = 0; segment < 4; ++segment) {
    for (std::size_t offset = 0; offset < std::size_t{64} * 1024; offset += sizeof *newest / 2) {
      auto& header = *reinterpret_cast<jitckpt::proxy::RecordHeader*>(log.segment(segment) + offset);
      if (header.call == static_cast<uint16_t>(jitckpt::proxy::Call::launch) && header.sequence < 10'000 &&
          (!newest || header.sequence > newest->sequence))
        newest = &header;
    }
  }
  ASSERT_NE(newest, nullptr);
  newest->bytes = 8;
}

TEST(Alone, FindsItsLogDamaged) {
  if (!alone()) GTEST_SKIP() << "only for other tests";
  const DeviceInts number(1, 4);
  launch_add(number.get(), 1);  // so that its kernel is known
  ok(cudaDeviceSynchronize());
  if (std::getenv("PROXY_TEST_KEEPS")) ok(cudaError_t(jitckpt_proxy_keep()));
  const pid_t server = find_server();
  kill(server, SIGSTOP);
  // The thread that reads the log is its first. It stops a moment later.
  while (text_of("/proc/" + std::to_string(server) + "/status").find("State:\tT") == std::string::npos)
    std::this_thread::yield();
  launch_add(number.get(), 1);
  damage_newest_launch();
  kill(server, SIGCONT);
  const cudaError_t error = cudaDeviceSynchronize();
  std::printf("error %d: %s\n", error, cudaGetErrorString(error));
}

// Where the calls are made again the record is as damaged as before: the program is told in the end.
TEST(Processes, ADamagedLogIsNamed) {
  for (const std::vector<std::string>& variables : {std::vector<std::string>(), {"PROXY_TEST_KEEPS=1"}}) {
    const Ended ended = run_alone("Alone.FindsItsLogDamaged", variables);
    EXPECT_NE(ended.output.find("of the log (segment 0, byte "), std::string::npos) << ended.output;
    EXPECT_NE(ended.output.find("has a length that can't be."), std::string::npos) << ended.output;
    EXPECT_NE(ended.output.find("look for memory errors in dmesg"), std::string::npos) << ended.output;
    EXPECT_NE(ended.output.find("error 46: "), std::string::npos) << ended.output;
  }
}

pid_t server_in(const std::string& output) {
  const auto place = output.find("server ");
  return place == std::string::npos ? 0 : std::atoi(output.c_str() + place + 7);
}

TEST(Processes, TheServerEndsWithTheProgram) {
  const Ended ended = run_alone("Alone.WritesItsServerAndEnds");
  EXPECT_EQ(ended.status, 0) << ended.output;
  ASSERT_NE(server_in(ended.output), 0) << ended.output;
  EXPECT_NE(kill(server_in(ended.output), 0), 0);  // not a moment later
}

TEST(Processes, TheServerEndsWithAProgramThatIsKilled) {
  const Ended ended = run_alone("Alone.WritesItsServerAndEnds", {"PROXY_TEST_ABORT=1"});
  ASSERT_NE(server_in(ended.output), 0) << ended.output;
  EXPECT_TRUE(ends(server_in(ended.output)));
}

// The device answers who waits for it, but not once it has failed.
TEST(Alone, WaitsForADeviceThatFails) {
  if (!alone()) GTEST_SKIP() << "only for other tests";
  const OwnStream stream;
  Gate gate(stream);
  ok(cudaLaunchKernel(kernels::fail(), dim3(1), dim3(1), nullptr, 0, stream));
  std::thread waiting([&] {
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
    std::_Exit(testing::Test::HasFailure() ? 1 : 0);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // mostly it waits by then
  gate.open();
  waiting.join();
}

TEST(Processes, WhoWaitsForADeviceThatFailsIsTold) {
  const Ended ended = run_alone("Alone.WaitsForADeviceThatFails");
  EXPECT_EQ(ended.status, 0) << ended.output;
}

TEST(Processes, ALostServerFailsEveryCall) {
  const Ended ended = run_alone("Alone.LosesItsServer");
  EXPECT_EQ(ended.status, 0) << ended.output;
}

TEST(Alone, AsksForMemory) {
  if (!alone()) GTEST_SKIP() << "only for other tests";
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, 8);
  std::printf("%d: %s\n", error, cudaGetErrorString(error));
}

// A copy of the server's program with another hash of the table of calls.
class OtherVersion {
 public:
  OtherVersion() : path_(testing::TempDir() + "other-version-" + std::to_string(getpid())) {
    std::string program = text_of(PROXY_SERVER);
    const auto bytes = [](uint64_t number) {
      return std::string(reinterpret_cast<char*>(&number), sizeof number);
    };
    for (std::size_t at = 0; (at = program.find(bytes(jitckpt::proxy::table_hash), at)) != program.npos;
         ++changed_)
      program.replace(at, sizeof jitckpt::proxy::table_hash, bytes(jitckpt::proxy::table_hash + 1));
    std::ofstream(path_, std::ios::binary) << program;
    chmod(path_.c_str(), 0700);
  }
  ~OtherVersion() { unlink(path_.c_str()); }
  OtherVersion(const OtherVersion&) = delete;
  OtherVersion& operator=(const OtherVersion&) = delete;
  const std::string& path() const { return path_; }
  int changed() const { return changed_; }

 private:
  std::string path_;
  int changed_ = 0;
};

TEST(Processes, AServerOfAnotherVersionIsRefusedAndRefuses) {
  const OtherVersion server;
  ASSERT_GT(server.changed(), 0);
  const Ended ended = run_alone("Alone.AsksForMemory", {"JITCKPT_PROXY_SERVER=" + server.path()});
  EXPECT_NE(ended.output.find("the program's library knows other calls"), std::string::npos) << ended.output;
  EXPECT_NE(ended.output.find("server knows other calls than its client"), std::string::npos) << ended.output;
}

TEST(Processes, WhatKeepsTheServerFromStartingIsSaid) {
  const auto output = [](const char* variable) {
    return run_alone("Alone.AsksForMemory", {variable}).output;
  };
  EXPECT_NE(output("JITCKPT_PROXY_SERVER=/nowhere").find("can't start its server /nowhere: No such file"),
            std::string::npos);
  EXPECT_NE(output("JITCKPT_PROXY_SERVER=/bin/false").find("ended with status 1 before it was ready"),
            std::string::npos);
  EXPECT_NE(output("JITCKPT_PROXY_LOG_BYTES=many").find("set it to a whole number"), std::string::npos);
}

// Calls by the thousand through a log of two small segments.
TEST(Alone, CallsMoreThanTheLogHolds) {
  if (!alone()) GTEST_SKIP() << "only for other tests";
  const DeviceInts numbers(100000, 3);
  for (int launch = 0; launch < 20000; ++launch) launch_add(numbers.get(), 1);
  std::vector<int> expected(100000, 3);
  expected[0] += 20000;
  EXPECT_EQ(numbers.read(), expected);
}

TEST(Processes, ASmallLogIsUsedAgainAndAgain) {
  const Ended ended = run_alone("Alone.CallsMoreThanTheLogHolds",
                                {"JITCKPT_PROXY_SEGMENT_BYTES=262144", "JITCKPT_PROXY_LOG_BYTES=524288"});
  EXPECT_EQ(ended.status, 0) << ended.output;
}

}  // namespace
