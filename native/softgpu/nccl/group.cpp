#include "softgpu/nccl/group.h"

#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include "softgpu/nccl/failure.h"
#include "softgpu/nccl/thread.h"

namespace softgpu::nccl {
namespace {

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<Call> calls;
  std::vector<HostTask> tasks;
};
thread_local Group group;

void run(const HostTask& task) {
  try {
    task.work();
    for (const auto& communicator : task.communicators) communicator->set_state(ncclSuccess);
  } catch (const NcclFailure& failure) {
    for (const auto& communicator : task.communicators)
      communicator->set_state(failure.code(), failure.what());
    if (task.blocking && task.made) {
      remove_handle(*task.made);
      std::atomic_ref(*task.made).store(nullptr);
    }
    throw;
  }
}

// The tasks of a group need not wait for each other: several ranks may be made by one thread.
ncclResult_t run(std::vector<HostTask> tasks) {
  for (const HostTask& task : tasks) {
    for (const auto& communicator : task.communicators) communicator->set_state(ncclInProgress);
  }
  if (tasks.size() == 1 && tasks[0].blocking) {
    run(tasks[0]);
    return ncclSuccess;
  }
  struct Outcome {
    ncclResult_t result = ncclSuccess;
    std::string error;
  };
  std::vector<Outcome> outcomes(tasks.size());
  std::vector<std::thread> threads;
  ncclResult_t result = ncclSuccess;
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (tasks[i].blocking) {
      threads.push_back(start_thread([&task = tasks[i], &outcome = outcomes[i]] {
        outcome.result = report([&] {
          run(task);
          return ncclSuccess;
        });
        outcome.error = last_error();
      }));
    } else {
      start_thread([task = std::move(tasks[i])] {
        report([&] {
          run(task);
          return ncclSuccess;
        });
      }).detach();
      result = ncclInProgress;
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (const Outcome& outcome : outcomes) {
    if (outcome.result != ncclSuccess) throw NcclFailure(outcome.result, outcome.error);
  }
  return result;
}

}  // namespace

void start_group() { ++group.depth; }

ncclResult_t end_group() {
  if (group.depth == 0) throw NcclFailure(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart.");
  if (--group.depth > 0) return group.error;
  const Group ended = std::exchange(group, {});
  if (ended.error != ncclSuccess) return ended.error;
  const ncclResult_t result = ended.tasks.empty() ? ncclSuccess : run(ended.tasks);
  launch(ended.calls);
  return result;
}

void drop_group() { group = {}; }

ncclResult_t submit(const Call& call) {
  if (group.depth > 0) {
    group.calls.push_back(call);
  } else {
    launch({call});
  }
  return ncclSuccess;
}

ncclResult_t submit(HostTask task) {
  if (group.depth == 0) return run(std::vector{std::move(task)});
  group.tasks.push_back(std::move(task));
  return ncclSuccess;
}

void spoil_group(ncclResult_t error) {
  if (group.depth > 0 && group.error == ncclSuccess) group.error = error;
}

}  // namespace softgpu::nccl
