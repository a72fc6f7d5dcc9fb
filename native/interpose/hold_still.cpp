#pragma GCC visibility push(default)
#include "interpose/hold_still.h"
#pragma GCC visibility pop

#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

#include "ground/environment.h"

namespace {

std::array<struct sigaction, NSIG> previous{};
std::atomic<pid_t> decider{0};

bool is_for_the_agent(const siginfo_t& info) {
  const pid_t agent = decider.load();
  const pid_t sender = info.si_pid;  // 0: it is outside of this process's namespace
  if (info.si_code > 0 || sender == agent) return false;
  // A sender that has ended by now is taken for a stranger: those of the session live on to see what happens.
  if (sender != 0 && getsid(sender) == getsid(0)) return false;
  return kill(agent, 0) == 0 || errno == EPERM;
}

void on_signal(int number, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  const struct sigaction& before = previous[static_cast<std::size_t>(number)];
  if (!is_for_the_agent(*info)) {
    if (before.sa_flags & SA_SIGINFO) {
      before.sa_sigaction(number, info, context);
    } else if (before.sa_handler == SIG_DFL) {
      sigaction(number, &before, nullptr);
      raise(number);  // comes once this handler has returned
    } else if (before.sa_handler != SIG_IGN) {
      before.sa_handler(number);
    }
  }
  errno = saved_errno;
}

// What Python's multiprocessing and torch start for a rank, and its loader can't do without: their resource
// tracker and fork server, what they spawn, until it has imported torch, and what removes shared memory from
// /dev/shm.
bool is_helper() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string line{std::istreambuf_iterator<char>(file), {}};
  const std::string program = line.substr(0, line.find('\0'));
  return program.ends_with("torch_shm_manager") ||
         line.find(std::string("\0from multiprocessing.", 22)) != std::string::npos;
}

// 0: none, or what is set can't be meant, which its own processes say: a helper does not end for that.
pid_t agent_here() {
  try {
    return static_cast<pid_t>(jitckpt::environment::read(jitckpt::environment::agent_pid));
  } catch (const std::runtime_error&) {
    return 0;
  }
}

// None of them has code of ours that could do it later.
[[gnu::constructor]] void hold_helpers_still() {
  const pid_t agent = agent_here();
  if (agent <= 0 || !is_helper()) return;
  for (const int number : {SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}) {
    struct sigaction now{};
    if (sigaction(number, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) jitckpt_hold_still(number, agent);
  }
}

}  // namespace

int jitckpt_hold_still(int signal_number, int agent) {
  if (signal_number <= 0 || signal_number >= NSIG) return -1;
  struct sigaction now{};
  if (sigaction(signal_number, nullptr, &now) != 0) return -1;
  decider = agent;
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_signal) return 0;
  previous[static_cast<std::size_t>(signal_number)] = now;
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | (now.sa_flags & (SA_RESTART | SA_ONSTACK));
  const bool was_default = !(now.sa_flags & SA_SIGINFO) && now.sa_handler == SIG_DFL;
  if (was_default) action.sa_flags |= SA_RESTART;  // nothing of the program's is interrupted
  action.sa_mask = now.sa_mask;
  return sigaction(signal_number, &action, nullptr);
}
