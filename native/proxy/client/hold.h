// The program's calls wait while its job recovers. The agent's orders come from the control thread, failures
// from the threads that meet them.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

namespace jitckpt::proxy::client {

class Hold {
 public:
  // Whether there is somebody who recovers from failures.
  bool on() const { return on_; }
  bool held() const { return held_.load(std::memory_order_acquire); }
  // Waits until the host is not held.
  void pass() {
    if (held()) [[unlikely]]
      wait();
  }
  // Runs what must not be done while the host is held.
  void when_free(const std::function<void()>& work);

  // A call has met a failure; `still` says whether that is no news of a server that was replaced meanwhile.
  // call: the place of the program that would be told; 0: none. Waits for the recovery; false if there is
  // none: the program is to be told.
  bool recovers(uint64_t call, const std::string& error, const std::function<bool()>& still);
  // The same without waiting: from now on the host is held. False if the program is to be told.
  bool alarm(uint64_t call, const std::string& error, const std::function<bool()>& still);
  // Something has failed that is no error of a call: there is nobody to be told.
  void alarm(const std::string& error);
  // Why nobody recovers any more; empty if somebody does, or nobody ever did.
  std::string given_up() const;
  // The program begins a minibatch, and its device is no more than one behind: two of them after the one in
  // which it was told of a failure, that does not matter any more.
  void forget_failures();

  // For the control thread. news: called, from any thread, when there is an alarm.
  struct Failed {
    uint64_t call = 0;
    std::string error;  // empty: nothing has failed
  };
  void begin(std::function<void()> news);
  // The host is held though nothing has failed, until it is released: what fails meanwhile is an alarm.
  void pause();
  void stop();
  // Between two servers: runs `work` while no thread looks at failures, and forgets those of before.
  void replay(bool deliver_errors, const std::function<void()>& work);
  // What has failed in the newest execution.
  Failed failed() const;
  // The failure that the agent has still to hear of.
  Failed take_alarm();
  // The replay is over: the host goes on. False if something has failed meanwhile.
  bool release();
  void give_up(const std::string& why);
  // The process ends.
  void end();

 private:
  void wait();
  bool raise(uint64_t call, const std::string& error, const std::function<bool()>& still);
  void note(uint64_t call, const std::string& error);

  std::atomic<bool> on_{false}, held_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> news_;
  bool stopped_ = false;  // between the order to stop and the replay: what fails then is of no interest
  int delivers_ = 0;      // in how many minibatches still the program is told of failures
  bool told_ = true;      // whether the agent has heard of `failed_`
  Failed failed_;
  std::string given_up_;
};

}  // namespace jitckpt::proxy::client
