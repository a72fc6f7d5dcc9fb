// The socket to the agent: one JSON object a message (SOCK_SEQPACKET).
#pragma once
#include <atomic>
#include <optional>
#include <string>
#include <string_view>

namespace jitckpt::interpose {

class AgentChannel {
 public:
  // -1: there is no agent.
  explicit AgentChannel(int descriptor);

  bool connected() const { return descriptor_.load(std::memory_order_relaxed) >= 0; }
  int descriptor() const { return descriptor_.load(std::memory_order_relaxed); }

  // Any thread. False if there is no agent, or it does not read for a second.
  bool send(std::string_view message);

  enum class Received { message, nothing, end };
  Received receive(std::string& message);

  // The agent is gone.
  void forget() { descriptor_.store(-1, std::memory_order_relaxed); }

 private:
  std::atomic<int> descriptor_;
};

}  // namespace jitckpt::interpose
