#include "interpose/control.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

#include "interpose/gate.h"
#include "interpose/messages.h"
#include "interpose/save_calls.h"
#include "interpose/termination.h"
#include "real_calls.h"
#include "watchdog/own_thread.h"

namespace jitckpt::interpose {
namespace {

constexpr std::chrono::milliseconds busy_look_every(2);
// Of the shortest time that a collective may take, between two looks for one that hangs; with what is longest
// (the clock is to tick twice a second) and shortest. What the agent says is heard at once.
constexpr double looks_in_patience = 20;
constexpr double longest_look_s = 0.4, shortest_look_s = 0.01;
constexpr double longest_rest = 10;   // seconds until a save begins on a device that does not come to rest
constexpr double gil_patience = 0.1;  // until threads in our calls are made to give the GIL up
constexpr double gil_last_patience = 0.25;  // after that, until every thread is
constexpr double own_save_deadline = 300;   // of a save that no agent watches over
constexpr double errors_kept_for = 60;      // an agent that orders no save in this time will not order one
constexpr int exit_status = 75;             // EX_TEMPFAIL: run the job again

// Seconds that every collective gets.
double shortest_patience(const jitckpt_config_t& config) {
  return config.hang_floor_s > 0 ? std::min(config.hang_floor_s, config.hang_timeout_s)
                                 : config.hang_timeout_s;
}

}  // namespace

Control::Control(const jitckpt_config_t& config, LibraryState& library, watchdog::Poller& poller)
    : config_(config),
      look_every_(look_every(config)),
      library_(library),
      poller_(poller),
      agent_(config.agent_fd),
      wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

Control::~Control() { close(wake_); }

std::chrono::milliseconds Control::look_every(const jitckpt_config_t& config) {
  if (config.hang_timeout_s <= 0) return std::chrono::milliseconds(int64_t(longest_look_s * 1e3));
  const double seconds =
      std::clamp(shortest_patience(config) / looks_in_patience, shortest_look_s, longest_look_s);
  return std::chrono::milliseconds(int64_t(seconds * 1e3));
}

void Control::start() {
  library_.device.clock.tick(watchdog::steady_seconds());
  if (!agent_.connected()) termination::catch_signal(wake_);
  thread_ = watchdog::own_thread("jitckpt-control", [this] { loop(); });
}

void Control::stop() {
  stopping_ = true;
  eventfd_write(wake_, 1);
  thread_.join();
  termination::release_signal();
}

void Control::wait_for_save() const {
  const double deadline = watchdog::steady_seconds() + own_save_deadline;
  while (saving_ && watchdog::steady_seconds() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

void Control::resume() {
  resume_wanted_ = true;
  eventfd_write(wake_, 1);
}

void Control::nccl_failed(const char* operation, ncclResult_t result) {
  const char* const text = real::ncclGetErrorString(result);
  errors_kept_until_ = library_.device.clock.now() + errors_kept_for;
  if (agent_.connected()) {
    tell_agent(messages::nccl_error(operation, result, text));
    return;
  }
  {
    const std::lock_guard lock(failure_mutex_);
    failure_ = std::string(operation) + " failed: " + text;
  }
  failure_to_handle_ = true;
  eventfd_write(wake_, 1);
}

void Control::tell_agent(const std::string& message) {
  if (agent_.send(message)) return;
  std::fprintf(stderr, "jitckpt: the agent does not take this message: %.200s\n", message.c_str());
}

bool Control::save_expected() const { return holding() || library_.device.clock.now() < errors_kept_until_; }

void Control::loop() {
  thread_id_ = static_cast<pid_t>(syscall(SYS_gettid));
  while (!stopping_) {
    wait(phase_ == Phase::running || phase_ == Phase::held ? look_every_ : busy_look_every);
    library_.device.clock.tick(watchdog::steady_seconds());
    hear_agent();
    if (termination::arrived() && ending_ == Ending::none) order_own("SIGTERM", Ending::signal);
    if (failure_to_handle_.exchange(false) && ending_ == Ending::none) {
      const std::lock_guard lock(failure_mutex_);
      order_own(failure_, Ending::exit);
    }
    switch (phase_) {
      case Phase::running:
        if (order_) {
          begin_hold();
        } else {
          look_for_hang();
        }
        break;
      case Phase::resting:
        rest();
        break;
      case Phase::saving:
        watch_save();
        break;
      case Phase::held:
        if (order_) {
          begin_hold();
        } else if (ending_ != Ending::none) {
          end_process();
        } else if (resume_wanted_) {
          open();
        }
        break;
    }
    if (phase_ == Phase::running) resume_wanted_ = false;
    if (ending_ != Ending::none && library_.device.clock.now() >= ending_at_) end_process();
  }
  if (phase_ != Phase::running) open();
}

void Control::wait(std::chrono::milliseconds longest) {
  pollfd sources[] = {{wake_, POLLIN, 0}, {agent_.descriptor(), POLLIN, 0}};
  poll(sources, agent_.connected() ? 2 : 1, static_cast<int>(longest.count()));
  eventfd_t value;
  eventfd_read(wake_, &value);
}

void Control::hear_agent() {
  std::string message;
  while (agent_.connected()) {
    switch (agent_.receive(message)) {
      case AgentChannel::Received::nothing:
        return;
      case AgentChannel::Received::end:
        agent_.forget();
        if (ending_ == Ending::none) order_own("the agent died", Ending::exit);
        return;
      case AgentChannel::Received::message:
        switch (messages::order_of(message)) {
          case messages::AgentOrder::save:
            order_ = message;
            resume_wanted_ = false;
            break;
          case messages::AgentOrder::resume:
            resume_wanted_ = true;
            break;
          case messages::AgentOrder::ask:
            tell_agent(messages::progress(messages::question_of(message), library_.communicators.progress(),
                                          library_.device.watches.in_flight(library_.device.clock.now())));
            break;
          case messages::AgentOrder::unknown:
            std::fprintf(stderr, "jitckpt: the agent sent an order that this library does not know: %.200s\n",
                         message.c_str());
        }
    }
  }
}

void Control::order_own(const std::string& reason, Ending ending) {
  ending_ = ending;
  ending_reason_ = reason;
  ending_at_ = library_.device.clock.now() + own_save_deadline;
  const bool saved_already = phase_ == Phase::held && saved_;
  if (phase_ == Phase::saving || phase_ == Phase::resting || saved_already) return;  // that save serves
  order_ = messages::own_save_order(reason, own_save_deadline);
}

void Control::look_for_hang() {
  if (config_.hang_timeout_s <= 0) return;
  const double now = library_.device.clock.now();
  const auto hung =
      library_.device.watches.overdue(now, {shortest_patience(config_), config_.hang_timeout_s});
  if (!hung) return;
  if (agent_.connected()) {
    tell_agent(messages::hang(*hung, library_.device.watches.in_flight(now)));
  } else {
    order_own(messages::in_words(*hung), Ending::exit);
  }
}

void Control::begin_hold() {
  current_order_ = std::exchange(order_, std::nullopt).value();
  held_since_ = library_.device.clock.now();
  saved_ = false;
  saving_ = true;
  close_gate();
  poller_.look_closely(true);
  poller_.interrupt();  // a thread that waits for the device to catch up comes to the gate
  rest_.emplace(held_since_, config_.settle_s, longest_rest);
  phase_ = Phase::resting;
}

void Control::rest() {
  const auto outcome = rest_->look(library_.device.clock.now(), poller_.observation());
  if (outcome) start_saver(*outcome);
}

void Control::start_saver(watchdog::RestOutcome outcome) {
  const double now = library_.device.clock.now();
  if (outcome == watchdog::RestOutcome::bound) hold_steps_as_well();
  if (agent_.connected())
    tell_agent(messages::held(messages::save_id_of(current_order_), now - held_since_, outcome));
  library_.step_thread.device_at_rest();
  begin_save();
  saver_ = Saver::start(config_.save, current_order_, gil(), library_.step_device);
  rescue_step_ = 0;
  rescue_at_ = now + gil_patience;
  phase_ = Phase::saving;
}

void Control::watch_save() {
  if (saver_->entered()) {
    watchdog::end_rescue();
  } else {
    rescue_gil();
  }
  if (!saver_->done()) return;
  end_save();
  save::end();
  saved_ = saver_->result() == 0;
  phase_ = Phase::held;
  saving_ = false;
}

void Control::rescue_gil() {
  if (!config_.gil_check) return;
  const double now = library_.device.clock.now();
  if (now < rescue_at_) return;
  if (rescue_step_++ == 0) {
    if (const char* problem = watchdog::begin_rescue(gil(), wait_until_open)) {
      std::fprintf(stderr, "jitckpt: %s.\n", problem);
    }
    watchdog::signal_threads_in_calls();
  } else {
    // Again and again: the next thread that gets the GIL may get stuck with it as well.
    watchdog::signal_all_threads_except({thread_id_, poller_.thread_id(), saver_->thread_id()});
  }
  rescue_at_ = now + gil_last_patience;
}

void Control::open() {
  watchdog::end_rescue();
  resume_wanted_ = false;
  errors_kept_until_ = 0;  // the save for them has been: the application may hear of them now
  library_.device.watches.restart_clocks(library_.device.clock.now());
  poller_.look_closely(false);
  poller_.run(hold::free_postponed);
  phase_ = Phase::running;
  open_gate();
}

void Control::end_process() {
  std::fprintf(stderr, "jitckpt: %s: %s; the process ends.\n", ending_reason_.c_str(),
               saved_ ? "the state is saved" : "no state was saved");
  if (ending_ == Ending::signal) {
    // The signal does now what it would have done: a handler of the application's gets it, and can use the
    // device.
    termination::release_signal();
    open();
    kill(getpid(), SIGTERM);
    ending_ = Ending::none;
    return;
  }
  _exit(exit_status);
}

}  // namespace jitckpt::interpose
