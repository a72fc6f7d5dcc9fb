// Threads of ours take no signals: those are the application's, and its handlers belong on its threads.
#pragma once
#include <csignal>
#include <thread>
#include <utility>

namespace softgpu::nccl {

template <class Work>
std::thread start_thread(Work work) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  struct Restore {
    sigset_t* mask;
    ~Restore() { pthread_sigmask(SIG_SETMASK, mask, nullptr); }
  } restore{&before};
  return std::thread(std::move(work));
}

}  // namespace softgpu::nccl
