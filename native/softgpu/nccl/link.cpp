#include "link.h"

namespace softgpu::nccl {

Link::Link(SharedSegment& segment, int here, int there)
    : segment_(&segment),
      here_(here),
      there_(there),
      state_(&segment.rank(there)),
      to_peer_(&segment.channel(here, there)),
      from_peer_(&segment.channel(there, here)) {}

void Link::tell(const News& news) const {
  // What is in shared memory is there already: the other rank has but to look.
  (news.counter == News::Counter::host_rounds ? state_->host_bell : state_->device_bell).ring();
}

}  // namespace softgpu::nccl
