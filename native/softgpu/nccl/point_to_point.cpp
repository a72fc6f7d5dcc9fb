#include "point_to_point.h"

#include <algorithm>
#include <cstring>

#include "../runtime/enqueue.h"
#include "mismatch.h"

namespace softgpu::nccl {

Transfer::Transfer(Communicator& communicator, const Operation& operation)
    : shared_(communicator.shared()),
      rank_(communicator.rank()),
      peer_(operation.peer),
      sends_(operation.kind == Kind::send),
      channel_(sends_ ? shared_.channel(rank_, peer_) : shared_.channel(peer_, rank_)),
      descriptor_(describe(operation, 0)),
      data_(static_cast<std::byte*>(shadow(sends_ ? operation.send : operation.receive))),
      bytes_(operation.count * size_of(operation.type)),
      chunks_(std::max<uint64_t>(1, (bytes_ + channel_slot_bytes - 1) / channel_slot_bytes)) {}

bool Transfer::step() {
  if (!(sends_ ? may_send() : may_receive())) return false;
  const size_t begin = moved_ * channel_slot_bytes;
  const size_t count = std::min(channel_slot_bytes, bytes_ - begin);
  if (sends_) {
    const uint64_t chunk = channel_.written;
    channel_.descriptors[chunk % channel_slots] = descriptor_;
    if (count != 0) std::memcpy(shared_.channel_slot(rank_, peer_, chunk), data_ + begin, count);
    channel_.written = chunk + 1;
  } else {
    const uint64_t chunk = channel_.read;
    if (count != 0) std::memcpy(data_ + begin, shared_.channel_slot(peer_, rank_, chunk), count);
    channel_.read = chunk + 1;
  }
  ++moved_;
  shared_.rank(peer_).device_bell.ring();
  return true;
}

bool Transfer::may_send() const { return channel_.written - channel_.read < channel_slots; }

bool Transfer::may_receive() const {
  const uint64_t chunk = channel_.read;
  if (channel_.written == chunk) return false;
  const Descriptor& theirs = channel_.descriptors[chunk % channel_slots];
  if (match_transfer(theirs, descriptor_)) return true;
  report_mismatch(shared_, rank_, descriptor_, peer_, theirs);
  return false;
}

}  // namespace softgpu::nccl
