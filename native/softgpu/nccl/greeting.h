// How a connection begins: the one who connects says who it is, signed with the unique id's secret.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "softgpu/nccl/file_descriptor.h"
#include "softgpu/nccl/host.h"
#include "softgpu/nccl/secret.h"

namespace softgpu::nccl {

constexpr int maker_of_id = -1;  // as a rank

// Plain data: it is sent as it lies in memory.
struct RankGreeting {
  char protocol[16] = "softgpu-nccl-1";
  int32_t from = 0, to = 0;  // ranks
  int32_t ranks = 0;         // of the communicator; 0: nobody will come
  int32_t unused = 0;
  HostId host{};
  Key memory{};           // the name of its LocalMemory
  char address[64] = {};  // where it listens for ranks of other hosts
};

void greet(const FileDescriptor& socket, const Key& key, const RankGreeting& greeting,
           const std::atomic<bool>& aborted);

// Takes connections from those who know the secret. Strangers who connect can't hold up anybody.
class Reception {
 public:
  Reception(FileDescriptor listener, const Key& key) : listener_(std::move(listener)), key_(key) {}
  Reception(Reception&&) = default;
  ~Reception();

  struct Guest {
    FileDescriptor socket;
    RankGreeting greeting;
  };
  // The next of them. Throws a NcclFailure: ncclInternalError once *aborted is true (null: never), or
  // ncclSystemError if no connection can be taken any more.
  Guest next(const std::atomic<bool>* aborted);

 private:
  void accept_one();
  bool is_welcome(const FileDescriptor& socket, RankGreeting& greeting) const;

  FileDescriptor listener_;
  Key key_;
  std::vector<FileDescriptor> waiting_;  // their greetings have not come yet
};

}  // namespace softgpu::nccl
