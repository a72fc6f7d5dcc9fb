// One rank's end of the way to another rank of its communicator, or to itself.
//
// All that passes between two ranks passes here, whatever carries it: each tells the other that one of its
// counters has grown, and lets it read the slots that the counter speaks of.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "softgpu/nccl/network.h"
#include "softgpu/nccl/news.h"
#include "softgpu/nccl/operation.h"
#include "softgpu/nccl/shared_segment.h"

namespace softgpu::nccl {

class RankLink {
 public:
  // The segment is where this process sees the other rank: shared with it, or filled by the network (null if
  // the other rank is on this host).
  RankLink(SharedSegment& segment, int here, int there, Network* network);

  int peer() const { return there_; }

  // To be called after the counter has grown and the slot is filled.
  void tell(const News& news) const;

  // What the other rank has told.
  uint64_t written() const { return hear(state_->written); }
  uint64_t reduced() const { return hear(state_->reduced); }
  uint64_t done() const { return hear(state_->done); }
  uint64_t host_rounds() const { return hear(state_->host_rounds); }
  uint64_t sent() const { return hear(from_peer_->written); }  // chunks of its sends to this rank
  uint64_t received() const { return hear(to_peer_->read); }   // chunks of this rank's sends to it

  // It will tell no more, and why: the connection has ended. Never of a rank on this host.
  bool has_ended() const { return network_ && network_->has_ended(there_); }
  std::string reason_of_end() const;

  // What it has filled.
  const Descriptor& descriptor(uint64_t chunk) const { return state_->descriptors[chunk % slots]; }
  const std::byte* contribution(uint64_t chunk) const { return segment_->contribution(there_, chunk); }
  const std::byte* result(uint64_t chunk) const { return segment_->result(there_, chunk); }
  const HostMessage& host_message(uint64_t round) const { return state_->host_messages[round % 2]; }

  // The two channels between the ranks, for the end that is this rank's.
  Channel& to_peer() const { return *to_peer_; }
  Channel& from_peer() const { return *from_peer_; }
  std::byte* slot_to_peer(uint64_t chunk) const { return segment_->channel_slot(here_, there_, chunk); }
  const std::byte* slot_from_peer(uint64_t chunk) const {
    return segment_->channel_slot(there_, here_, chunk);
  }

 private:
  uint64_t hear(const std::atomic<uint64_t>& counter) const { return counter; }

  SharedSegment* segment_;
  Network* network_;
  int here_, there_;
  RankState* state_;
  Channel* to_peer_;
  Channel* from_peer_;
};

}  // namespace softgpu::nccl
