#include "interpose/termination.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

namespace jitckpt::interpose::termination {
namespace {

std::atomic<int> wake{-1};
std::atomic<bool> came{false};
struct sigaction previous{};
bool caught = false;

void on_signal(int) {
  const int saved_errno = errno;
  came.store(true);
  const uint64_t one = 1;
  // Can't fail but for an overflow, and then the thread is awake already.
  [[maybe_unused]] const ssize_t written = write(wake.load(), &one, sizeof one);
  errno = saved_errno;
}

}  // namespace

bool catch_signal(int wake_descriptor) {
  sigaction(SIGTERM, nullptr, &previous);
  if (!(previous.sa_flags & SA_SIGINFO) && previous.sa_handler == SIG_IGN) return false;
  wake = wake_descriptor;
  came = false;
  struct sigaction action{};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  caught = sigaction(SIGTERM, &action, nullptr) == 0;
  return caught;
}

bool arrived() { return came.load(); }

void release_signal() {
  if (!caught) return;
  caught = false;
  struct sigaction now{};
  sigaction(SIGTERM, nullptr, &now);
  // Whoever took the signal after us keeps it.
  if (!(now.sa_flags & SA_SIGINFO) && now.sa_handler == on_signal) sigaction(SIGTERM, &previous, nullptr);
}

}  // namespace jitckpt::interpose::termination
