// Jobs of several ranks: processes of this program, with a coordinator for their agent.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "proxy/tests/coordinator.h"
#include "proxy/tests/support.h"

int number_of(const char* variable, int otherwise = 0);

// What the ranks of a job tell each other besides NCCL: small files in a folder, as torch has its store.
class Store {
 public:
  explicit Store(std::string folder) : folder_(std::move(folder)) {}
  void set(const std::string& name, const std::string& value) const;
  std::string get(const std::string& name) const;

 private:
  std::string folder_;
};

// A new communicator of all ranks of this process's job.
ncclComm_t meet(const Store& store, const std::string& name);

void kill_server();
// Tells the server of this process to suffer a fault (docs/reference/faults.md); another one, if it is just
// being replaced.
void order_fault(const std::string& text);
// What the job compares with that of another one.
void print(const char* what, const std::vector<int>& numbers);

// As c10d's: asks on and on whether a communicator has failed or an event is over, and must see no failure.
class Watchdog {
 public:
  Watchdog(ncclComm_t communicator, cudaEvent_t event)
      : thread_([this, communicator, event] {
          ok(cudaSetDevice(number_of("RANK")));
          while (!ends_) {
            ncclResult_t state = ncclInternalError;
            ok(ncclCommGetAsyncError(communicator, &state));
            EXPECT_EQ(state, ncclSuccess);
            const cudaError_t over = cudaEventQuery(event);
            EXPECT_TRUE(over == cudaSuccess || over == cudaErrorNotReady) << over;
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
          }
        }) {}
  ~Watchdog() {
    ends_ = true;
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

// A job of processes of this program, with a coordinator.
struct Job {
  explicit Job(int ranks) : coordinator(ranks), outputs(static_cast<std::size_t>(ranks)) {}
  Coordinator coordinator;
  std::vector<Ended> outputs;

  void run(const std::string& test, const std::vector<std::string>& variables = {});
  // The lines of what the ranks have seen.
  std::vector<std::string> seen() const;
};
