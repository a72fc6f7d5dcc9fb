// What a rank of another host sends to softgpu's NCCL: nothing is written but to slots and counters of its
// own.
#include "softgpu/nccl/network.h"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdlib>

namespace {

using namespace softgpu::nccl;

std::array<FileDescriptor, 2> pair_of_sockets() {
  int files[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, files) != 0) std::abort();
  return {FileDescriptor(files[0]), FileDescriptor(files[1])};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  SharedSegment local{2}, mirror{2};
  auto from = pair_of_sockets(), to = pair_of_sockets();
  std::vector<RemotePeer> peers;
  peers.push_back({.rank = 1, .address = "", .to = std::move(to[0]), .from = std::move(from[0])});
  Network network(0, local, mirror, std::move(peers));
  if (size != 0 && send(from[1].get(), data, size, MSG_NOSIGNAL) < 0) return 0;  // it has been hung up on
  from[1] = {};
  while (!network.has_ended(1)) usleep(20);
  if (network.reason_of_end(1).empty()) std::abort();
  // It has no say in what this rank itself writes.
  const RankState& own = mirror.rank(0);
  if (own.written != 0 || own.reduced != 0 || own.done != 0 || own.host_rounds != 0) std::abort();
  return 0;
}
