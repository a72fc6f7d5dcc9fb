#include "interpose/saver.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <thread>
#include <utility>

#include "watchdog/device.h"
#include "watchdog/threads.h"

namespace jitckpt::interpose {

std::shared_ptr<Saver> Saver::start(Save save, std::string order, const watchdog::Gil& gil, int device) {
  auto saver = std::make_shared<Saver>();
  // Not one of the threads that block signals: programs that the save function starts inherit that. Detached,
  // because nobody can wait for a save function that hangs.
  std::thread([saver, save, order = std::move(order), gil, device] {
    saver->run(save, order, gil, device);
  }).detach();
  return saver;
}

void Saver::run(Save save, const std::string& order, const watchdog::Gil& gil, int device) {
  pthread_setname_np(pthread_self(), "jitckpt-saver");
  thread_id_ = static_cast<pid_t>(syscall(SYS_gettid));
  watchdog::this_thread().saves = true;
  if (device >= 0) {
    watchdog::use_device(device);
    watchdog::leave_captures_alone();
  }
  const int python = gil.ensure ? gil.ensure() : 0;
  entered_ = true;
  result_ = save(order.c_str());
  if (gil.restore) gil.restore(python);
  done_ = true;
}

}  // namespace jitckpt::interpose
