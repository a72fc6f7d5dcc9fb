#include "softgpu/nccl/link.h"

namespace softgpu::nccl {

RankLink::RankLink(SharedSegment& segment, int here, int there, Network* network)
    : segment_(&segment),
      network_(network),
      here_(here),
      there_(there),
      state_(&segment.rank(there)),
      to_peer_(&segment.channel(here, there)),
      from_peer_(&segment.channel(there, here)) {}

void RankLink::tell(const News& news) const {
  if (network_) return network_->send(there_, news);
  // What is in shared memory is there already: the other rank has but to look.
  (news.counter == News::Counter::host_rounds ? state_->host_bell : state_->device_bell).ring();
}

std::string RankLink::reason_of_end() const {
  return "The connection from rank " + std::to_string(there_) + " has ended (" +
         network_->reason_of_end(there_) +
         "): its process has ended, or it has aborted or destroyed this communicator.";
}

}  // namespace softgpu::nccl
