#include "watchdog/gil.h"

#include <dirent.h>
#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "watchdog/threads.h"

namespace jitckpt::watchdog {
namespace {

enum class Reach : int { nobody, threads_in_calls, everybody };

std::atomic<Reach> reach{Reach::nobody};
Gil rescued_gil;
void (*rescued_wait)() = nullptr;
int signal_number = 0;  // once chosen, the handler stays: a late signal would end the process otherwise

// Whether the signal has interrupted a system call in which the thread waited, other than for memory. Then
// the kernel has set it back before the instruction, to make the call again, or behind it, with EINTR.
bool is_waiting(const ucontext_t& context) {
  constexpr std::array<unsigned char, 2> call{0x0f, 0x05};
  constexpr std::array<long long, 6> about_memory{SYS_mmap, SYS_munmap,  SYS_mremap,
                                                  SYS_brk,  SYS_madvise, SYS_mprotect};
  const long long place = context.uc_mcontext.gregs[REG_RIP];
  const long long result = context.uc_mcontext.gregs[REG_RAX];
  const auto is_call_at = [&](long long address) {
    return std::memcmp(reinterpret_cast<const void*>(address), call.data(), call.size()) == 0;
  };
  if (result == -EINTR) return is_call_at(place - static_cast<long long>(call.size()));
  return is_call_at(place) &&
         std::find(about_memory.begin(), about_memory.end(), result) == about_memory.end();
}

void on_signal(int, siginfo_t*, void* context) {
  const int saved_errno = errno;
  const Reach now = reach.load(std::memory_order_acquire);
  Thread* const thread = current_thread;
  const bool in_call = thread && thread->state.load(std::memory_order_relaxed) == ThreadState::in_call;
  const bool reached = in_call ? now != Reach::nobody
                               : now == Reach::everybody && is_waiting(*static_cast<ucontext_t*>(context));
  if (reached) {
    if (rescued_gil.check()) {
      const ThreadState before = thread ? thread->state.exchange(ThreadState::parked) : ThreadState::running;
      without_gil(rescued_gil, rescued_wait);
      if (thread) thread->state.store(before);
    }
  }
  errno = saved_errno;
}

void send(pid_t thread) { syscall(SYS_tgkill, getpid(), thread, signal_number); }

// A real-time signal that nobody has taken.
int free_signal() {
  for (int candidate = SIGRTMAX; candidate >= SIGRTMIN; --candidate) {
    struct sigaction action{};
    if (sigaction(candidate, nullptr, &action) == 0 && !(action.sa_flags & SA_SIGINFO) &&
        action.sa_handler == SIG_DFL) {
      return candidate;
    }
  }
  return 0;
}

}  // namespace

const char* begin_rescue(const Gil& gil, void (*wait_for_resume)()) {
  rescued_gil = gil;
  rescued_wait = wait_for_resume;
  if (signal_number == 0) {
    const int candidate = free_signal();
    if (candidate == 0)
      return "no real-time signal is free, so that a thread that hangs can't be made to give up the GIL";
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_RESTART | SA_SIGINFO;
    sigemptyset(&action.sa_mask);
    sigaction(candidate, &action, nullptr);
    signal_number = candidate;
  }
  return nullptr;
}

void signal_threads_in_calls() {
  if (signal_number == 0) return;
  reach.store(Reach::threads_in_calls, std::memory_order_release);
  const pid_t self = static_cast<pid_t>(syscall(SYS_gettid));
  for_each_thread([self](const Thread& thread) {
    if (thread.id != self && thread.state.load(std::memory_order_relaxed) == ThreadState::in_call)
      send(thread.id);
  });
}

void signal_all_threads_except(const std::vector<pid_t>& ours) {
  if (signal_number == 0) return;
  reach.store(Reach::everybody, std::memory_order_release);
  DIR* const tasks = opendir("/proc/self/task");
  if (!tasks) return;
  while (const dirent* entry = readdir(tasks)) {
    const pid_t thread = static_cast<pid_t>(std::atoi(entry->d_name));
    if (thread > 0 && std::find(ours.begin(), ours.end(), thread) == ours.end()) send(thread);
  }
  closedir(tasks);
}

void end_rescue() { reach.store(Reach::nobody, std::memory_order_release); }

}  // namespace jitckpt::watchdog
