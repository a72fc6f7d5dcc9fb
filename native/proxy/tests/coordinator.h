// The agent of all ranks of a small job, as the tests need it: takes part in the protocol of
// docs/how-it-works/proxy.md with the workers, which are processes that the test has started.
#pragma once
#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "proxy/client/control_messages.h"

namespace control = jitckpt::proxy::client::control;

// Makes a folder of this process's own; removes those of processes that were killed and left theirs.
std::string temporary_folder(const std::string& prefix);

class Coordinator {
 public:
  explicit Coordinator(int ranks);
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  const std::string& path() const { return path_; }
  // Of the memory for the ranks' step barrier.
  std::string together() const;

  // Before the workers start.
  void start();

  // To be set before `start`.
  std::function<void(int rank, pid_t worker)> before_restart = [](int, pid_t) {
  };  // of a rank, not ordered yet
  std::function<void(int rank, pid_t worker)> before_replay = [](int, pid_t) {};  // of a rank, just ordered
  std::function<void(pid_t worker)> before_delivery = [](pid_t) {};  // of its own error, not ordered yet
  bool gives_up = false;                                             // instead of the first recovery
  bool gives_up_held = false;                                        // once all are held for it
  std::vector<std::byte> instead;  // sent in place of the first order, if it is not empty

  // What has happened, once all workers have ended.
  struct Recovery {
    uint64_t state = 0, newest = 0;  // newest: of all ranks' images
    int delivered = 0;               // ranks that were told their own error
    bool done = false;
    bool validates = false;             // nothing had failed
    std::set<int> stayed{};             // ranks that have the same server as before
    std::map<int, std::string> ways{};  // how each rank came to parameters and optimizer state
  };
  std::vector<Recovery> recoveries() const;
  // How many numbers were compared: of collectives, and of what one rank had sent another.
  std::pair<int, int> compared() const;
  std::string complaint() const;  // of the coordinator about the workers; empty: none

 private:
  enum class Phase : uint8_t { watching, holding, stopping, restarting, replaying, over };
  struct Worker {
    int socket = -1;
    pid_t process = 0;
    bool answered = false;
    control::Stopped report;
    std::string way;  // of this recovery; empty: from another rank
    std::vector<control::HostCopy> copy;
  };
  void run();
  void hear(int rank, const control::Numbered<control::FromWorker>& message);
  void begin_recovery(bool may_stay);
  void validate();
  void stopped();
  static std::string way(const control::Stopped& report, uint64_t state);
  void compare_counts();
  void restarted();
  void give_up(const std::string& why);
  std::vector<control::Making> creations(int rank, uint64_t state) const;
  void say(int rank, const control::FromAgent& message);
  bool all_answered() const;

  const int ranks_;
  std::string folder_, path_;
  int listener_ = -1, end_ = -1, together_ = -1;
  Phase phase_ = Phase::watching;
  control::RecoveryNumber number_;
  uint64_t state_ = 0;
  bool may_stay_ = false;  // servers
  std::map<int, Worker> workers_;
  std::vector<control::NamedId> ids_;
  std::map<int, control::Validates> validates_;  // what ranks say that wait for a validation
  std::map<int, std::pair<uint64_t, std::string>> failed_before_;
  mutable std::mutex mutex_;
  std::vector<Recovery> recoveries_;
  std::string complaint_;
  int collectives_ = 0, pairs_ = 0;
  std::thread thread_;
};
