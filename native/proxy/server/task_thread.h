// A thread for calls that may block, one after the other, while who has them made goes on.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace jitckpt::proxy {

class TaskThread {
 public:
  TaskThread();
  ~TaskThread();  // waits until the task that runs has returned; those behind it are dropped
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  void run(std::function<void()> task);

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace jitckpt::proxy
