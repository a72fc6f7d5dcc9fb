#pragma once
#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace jitckpt::watchdog {

// A thread of the library: the application's signals are not for it.
template <typename Body>
std::thread own_thread(const char* name, Body&& body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::forward<Body>(body));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace jitckpt::watchdog
