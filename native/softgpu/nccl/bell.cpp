#include "softgpu/nccl/bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace softgpu::nccl {
namespace {

// About 2 us. Longer would take the core from the very rank that is waited for when there are fewer cores
// than ranks.
constexpr int spins = 50;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void Bell::ring() {
  rings_.fetch_add(1);  // sequentially consistent, as what follows: see wait_after
  if (sleepers_.load() != 0) {
    syscall(SYS_futex, &rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

void Bell::wait_after(uint32_t heard, std::chrono::milliseconds limit) {
  for (int i = 0; i < spins; ++i) {
    if (rings() != heard) return;
    relax();
  }
  // Either ring() sees this sleeper, or the kernel sees its ring and doesn't put us to sleep.
  sleepers_.fetch_add(1);
  const timespec time{limit.count() / 1000, (limit.count() % 1000) * 1'000'000};
  syscall(SYS_futex, &rings_, FUTEX_WAIT, heard, &time, nullptr, 0);
  sleepers_.fetch_sub(1);
}

}  // namespace softgpu::nccl
