// libjitckpt_clock.so: preloaded where a rehearsed failure changes the time of day (jitckpt/faults/clock.py).
// What the process reads as the time of day is jitckpt_clock_ahead seconds ahead of the machine's; until when
// it waits by the time of day is brought back to that. The monotonic clocks are the machine's: nobody can set
// them.
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/time.h>
#include <time.h>

#include <atomic>
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

std::atomic<int64_t> jitckpt_clock_ahead{0};
static_assert(sizeof jitckpt_clock_ahead == sizeof(int64_t), "others write it by its address");
}
#pragma GCC visibility pop

namespace {

// A monotonic clock that has run for thirty years: what is later is a time of day.
constexpr time_t kNoUptime = 1'000'000'000;

template <typename Function>
Function next(const char* name, const char* version = nullptr) {
  void* found = version != nullptr ? dlvsym(RTLD_NEXT, name, version) : nullptr;
  return reinterpret_cast<Function>(found != nullptr ? found : dlsym(RTLD_NEXT, name));
}

bool is_time_of_day(clockid_t clock) {
  return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI;
}

timespec of_machine(const timespec& until) {
  timespec real = until;
  if (real.tv_sec > kNoUptime) real.tv_sec -= jitckpt_clock_ahead.load(std::memory_order_relaxed);
  return real;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int clock_gettime(clockid_t clock, timespec* now) noexcept {
  static const auto real = next<int (*)(clockid_t, timespec*)>("clock_gettime");
  int result = real(clock, now);
  if (result == 0 && is_time_of_day(clock))
    now->tv_sec += jitckpt_clock_ahead.load(std::memory_order_relaxed);
  return result;
}

int gettimeofday(timeval* now, void*) noexcept {
  timespec exact;
  int result = clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
  return result;
}

time_t time(time_t* at) noexcept {
  timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (at != nullptr) *at = exact.tv_sec;
  return exact.tv_sec;
}

int timespec_get(timespec* now, int base) noexcept {
  return base == TIME_UTC && clock_gettime(CLOCK_REALTIME, now) == 0 ? base : 0;
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* until) {
  // The C library has an older one by this name, for conditions of another shape.
  static const auto real = next<int (*)(pthread_cond_t*, pthread_mutex_t*, const timespec*)>(
      "pthread_cond_timedwait", "GLIBC_2.3.2");
  timespec machines = of_machine(*until);
  return real(condition, mutex, &machines);
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* until) {
  static const auto real =
      next<int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*)>("pthread_cond_clockwait");
  timespec machines = of_machine(*until);
  return real(condition, mutex, clock, &machines);
}

int sem_timedwait(sem_t* semaphore, const timespec* until) {
  static const auto real = next<int (*)(sem_t*, const timespec*)>("sem_timedwait");
  timespec machines = of_machine(*until);
  return real(semaphore, &machines);
}

int sem_clockwait(sem_t* semaphore, clockid_t clock, const timespec* until) {
  static const auto real = next<int (*)(sem_t*, clockid_t, const timespec*)>("sem_clockwait");
  timespec machines = of_machine(*until);
  return real(semaphore, clock, &machines);
}
}
#pragma GCC visibility pop
