// The control thread: hears the agent, finds hangs, and carries a save through. It makes no device call, so
// that nothing on the device can stop it.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "interpose/agent_channel.h"
#include "interpose/jitckpt.h"
#include "interpose/library.h"
#include "interpose/saver.h"
#include "watchdog/rest.h"

namespace jitckpt::interpose {

class Control {
 public:
  Control(const jitckpt_config_t& config, LibraryState& library, watchdog::Poller& poller);
  ~Control();

  // How often to look whether a collective hangs.
  static std::chrono::milliseconds look_every(const jitckpt_config_t& config);

  void start();
  void stop();

  // Until an ordered save is over, within the time that such a save gets; any thread but our own. The caller
  // is about to end the interpreter that it runs in.
  void wait_for_save() const;

  void resume();  // as the agent's order; any thread

  // An NCCL call failed; any thread. Without an agent this orders a save.
  void nccl_failed(const char* operation, ncclResult_t result);
  // Until when errors of NCCL are to be kept from the application: a save is on its way.
  bool save_expected() const;

  AgentChannel& agent() { return agent_; }

 private:
  enum class Phase { running, resting, saving, held };
  enum class Ending { none, exit, signal };

  void loop();
  void wait(std::chrono::milliseconds longest);
  void hear_agent();
  void tell_agent(const std::string& message);
  void look_for_hang();
  void order_own(const std::string& reason, Ending ending);

  void begin_hold();
  void rest();
  void start_saver(watchdog::RestOutcome outcome);
  void watch_save();
  void rescue_gil();
  void open();
  void end_process();  // or, after SIGTERM, leaves it to the application's handler

  const jitckpt_config_t config_;
  const std::chrono::milliseconds look_every_;
  LibraryState& library_;
  watchdog::Poller& poller_;
  AgentChannel agent_;
  int wake_ = -1;
  std::thread thread_;
  std::atomic<pid_t> thread_id_{0};
  std::atomic<bool> stopping_{false}, resume_wanted_{false}, saving_{false};
  std::atomic<double> errors_kept_until_{0};
  std::atomic<bool> failure_to_handle_{false};
  std::mutex failure_mutex_;
  std::string failure_;

  // Only of the control thread:
  Phase phase_ = Phase::running;
  std::optional<std::string> order_;
  std::string current_order_;
  Ending ending_ = Ending::none;
  std::string ending_reason_;
  double held_since_ = 0, rescue_at_ = 0, ending_at_ = 0;
  int rescue_step_ = 0;
  std::optional<watchdog::RestDecision> rest_;
  std::shared_ptr<Saver> saver_;
  bool saved_ = false;
};

}  // namespace jitckpt::interpose
