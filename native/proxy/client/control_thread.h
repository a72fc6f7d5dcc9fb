// The thread that listens to the agent: it stops the host, replaces the server and lets the host go on, as
// the agent says. It needs nothing of the program, which may hold any lock.
#pragma once
#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "proxy/client/control_messages.h"
#include "proxy/client/hang_watch.h"

namespace jitckpt::proxy::client {

class Connection;

class ControlThread {
 public:
  // Connects to the agent's socket. Throws std::runtime_error with a sentence.
  ControlThread(Connection& connection, const std::string& path);
  ~ControlThread();
  ControlThread(const ControlThread&) = delete;
  ControlThread& operator=(const ControlThread&) = delete;

  // In a forked child: the agent is the parent's.
  void forget();

 private:
  void run();
  // False: there is nothing to be heard any more.
  bool listen();
  void carry_out(const control::FromAgent& order);
  void restart(const control::Restart& order);
  void replay(const control::Replay& order);
  void look_at_server();
  void look_at_replay();
  void look_at_pause();
  void settled(const std::string& why_not);
  void go_on();
  bool replay_stands_still();
  // Tells the agent of a thread that waits for too long; it alone knows whether another rank is only late.
  void look_for_hangs();
  void tell_standing();
  void give_up(const std::string& why);
  void say(const control::FromWorker& message);

  // settling: the host is held, and what it has called is waited for; settled: that is over, or can't be.
  enum class Phase : uint8_t { watching, held, stopped, restarted, replaying, settling, settled, given_up };

  Connection& connection_;
  int socket_ = -1, news_ = -1;  // news_: something is to be looked at, or the process ends
  std::atomic<bool> ending_{false};
  Phase phase_ = Phase::watching;
  bool server_known_dead_ = false;
  control::RecoveryNumber number_;  // the newest that was heard
  std::chrono::steady_clock::time_point replay_began_, settles_until_;
  HangWatch hang_watch_;
  ReplayWatch replay_watch_;
  std::chrono::steady_clock::time_point told_at_;  // of a wait that is too long
  std::thread thread_;
};

}  // namespace jitckpt::proxy::client
