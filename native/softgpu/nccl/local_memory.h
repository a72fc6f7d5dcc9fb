// How the ranks of one host come to share memory.
//
// The first of them makes it, as a memfd, and hands it to the others through an abstract Unix socket.
#pragma once
#include <atomic>

#include "softgpu/nccl/file_descriptor.h"
#include "softgpu/nccl/greeting.h"
#include "softgpu/nccl/secret.h"

namespace softgpu::nccl {

class LocalMemory {
 public:
  // Listens from now on: make it before the others are told its name.
  explicit LocalMemory(const Key& key);
  const Key& name() const { return name_; }

  // The first rank's: memory for a communicator of `ranks`, which it hands to so many others.
  FileDescriptor share(int others, int ranks, const std::atomic<bool>& aborted);
  // The others': from the first one, whose socket has this name.
  FileDescriptor fetch(const Key& name, RankGreeting greeting, const std::atomic<bool>& aborted) const;

 private:
  Key name_, key_;
  Reception reception_;
};

}  // namespace softgpu::nccl
