// One end of a connection on which chunks go, after the agents have proved on it who they are.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

namespace jitckpt::memory_tier {

class ChunkConnection {
 public:
  using Clock = std::chrono::steady_clock;

  // Both descriptors stay the caller's. stop: readable (an eventfd) once all is to end; -1 for never.
  // patience: for the other side to take, or send, anything at all.
  ChunkConnection(int socket, int stop, std::chrono::nanoseconds patience)
      : socket_(socket), stop_(stop), patience_(patience) {}
  ~ChunkConnection() { be_woken_for(1); }
  ChunkConnection(const ChunkConnection&) = delete;
  ChunkConnection& operator=(const ChunkConnection&) = delete;

  // Each throws ChunkFailure: ended, silent or stopped.
  void receive(std::span<std::byte> whole);
  void send(std::span<const std::byte> whole, bool more_follows);
  void wait_until(Clock::time_point when);

  bool has_something() const;  // to be received

 private:
  bool wait_for(short events);  // false when its patience is at an end
  void be_woken_for(size_t bytes);

  int socket_, stop_;
  int woken_for_ = 1;
  std::chrono::nanoseconds patience_;
};

}  // namespace jitckpt::memory_tier
