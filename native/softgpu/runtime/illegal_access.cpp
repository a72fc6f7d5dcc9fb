#include "softgpu/runtime/illegal_access.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace softgpu {
namespace {

constexpr std::size_t most_devices = 64;  // see read_settings
// A kernel that sweeps over freed memory must not be stopped at each of its pages.
constexpr std::uintptr_t step = std::uintptr_t{2} << 20;

std::uintptr_t range_begin = 0, range_bytes = 0, device_span = 1;
std::atomic<bool> any{false};
std::atomic<std::ptrdiff_t> first[most_devices];  // plus 1; 0: none
struct sigaction before;

bool make_accessible(std::uintptr_t offset) {
  const std::uintptr_t device = offset / device_span * device_span;
  const std::uintptr_t within = (offset - device) / step * step;
  const std::uintptr_t begin = range_begin + device + within;
  const std::uintptr_t end = range_begin + device + std::min(within + step, device_span);
  // For pages of allocations, also of one that another thread is just making, this changes nothing.
  return syscall(SYS_mprotect, begin, end - begin, PROT_READ | PROT_WRITE) == 0;
}

void pass_on(int signal, siginfo_t* info, void* context) {
  if (before.sa_flags & SA_SIGINFO) {
    before.sa_sigaction(signal, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(signal);
  } else {
    sigaction(signal, &before, nullptr);  // the instruction runs again, and ends the process
  }
}

// Only calls that a signal's handler may make.
void handle(int signal, siginfo_t* info, void* context) {
  const auto offset = reinterpret_cast<std::uintptr_t>(info->si_addr) - range_begin;
  if (info->si_code != SEGV_ACCERR || offset >= range_bytes || !make_accessible(offset)) {
    pass_on(signal, info, context);
    return;
  }
  std::ptrdiff_t none = 0;
  first[offset / device_span].compare_exchange_strong(none,
                                                      static_cast<std::ptrdiff_t>(offset % device_span) + 1);
  any = true;
}

}  // namespace

void catch_illegal_accesses(void* shadow, std::size_t devices, std::size_t span) {
  range_begin = reinterpret_cast<std::uintptr_t>(shadow);
  range_bytes = devices * span;
  device_span = span;
  struct sigaction action{};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &before);
}

bool any_illegal_access() { return any.load(std::memory_order_relaxed); }

std::ptrdiff_t illegal_access(std::size_t device) { return first[device] - 1; }

}  // namespace softgpu
