// One send or receive, moved on chunk by chunk by whoever calls step(). A sender is done when its last chunk
// is in the channel, whether the receiver has come or not, as with NCCL.
#pragma once
#include "softgpu/nccl/communicator.h"
#include "softgpu/nccl/operation.h"

namespace softgpu::nccl {

class Transfer {
 public:
  Transfer(Communicator& communicator, const Operation& operation);

  // Does what can be done without waiting; false if that was nothing. Transfers of one channel in one
  // direction have to be stepped one after the other.
  bool step();
  bool finished() const { return moved_ == chunks_; }

  // Of another host, if its connection has ended and this waits for it; else null.
  const RankLink* lost_peer() const;

 private:
  bool may_send() const;
  bool may_receive() const;

  SharedSegment& shared_;
  const int rank_, peer_;
  const bool sends_;
  const RankLink& link_;
  Channel& channel_;
  const Descriptor descriptor_;
  std::byte* const data_;
  const size_t bytes_;
  const uint64_t chunks_;  // an empty message is one empty chunk, so that both sides have to call
  uint64_t moved_ = 0;
};

}  // namespace softgpu::nccl
