#include "softgpu/nccl/point_to_point.h"

#include <algorithm>
#include <cstring>

#include "softgpu/nccl/mismatch.h"
#include "softgpu/runtime/enqueue.h"

namespace softgpu::nccl {

Transfer::Transfer(Communicator& communicator, const Operation& operation)
    : shared_(communicator.shared()),
      rank_(communicator.rank()),
      peer_(operation.peer),
      sends_(operation.kind == Kind::send),
      link_(communicator.links()[peer_]),
      channel_(sends_ ? link_.to_peer() : link_.from_peer()),
      descriptor_(describe(operation, 0)),
      data_(static_cast<std::byte*>(shadow(sends_ ? operation.send : operation.receive))),
      bytes_(operation.count * size_of(operation.type)),
      chunks_(std::max<uint64_t>(1, (bytes_ + channel_slot_bytes - 1) / channel_slot_bytes)) {}

bool Transfer::step() {
  if (!(sends_ ? may_send() : may_receive())) return false;
  const size_t begin = moved_ * channel_slot_bytes;
  const size_t count = std::min(channel_slot_bytes, bytes_ - begin);
  const uint64_t chunk = sends_ ? channel_.written : channel_.read;
  News news{.counter = News::Counter::received, .value = chunk + 1, .descriptor = descriptor_};
  if (sends_) {
    channel_.descriptors[chunk % channel_slots] = descriptor_;
    if (count != 0) std::memcpy(link_.slot_to_peer(chunk), data_ + begin, count);
    channel_.written = chunk + 1;
    news.counter = News::Counter::sent;
    news.bytes = static_cast<uint32_t>(count);
  } else {
    if (count != 0) std::memcpy(data_ + begin, link_.slot_from_peer(chunk), count);
    channel_.read = chunk + 1;
  }
  ++moved_;
  link_.tell(news);
  return true;
}

const RankLink* Transfer::lost_peer() const {
  if (!link_.has_ended()) return nullptr;  // before the last look at what it told
  return (sends_ ? may_send() : may_receive()) ? nullptr : &link_;
}

bool Transfer::may_send() const { return channel_.written - link_.received() < channel_slots; }

bool Transfer::may_receive() const {
  const uint64_t chunk = channel_.read;
  if (link_.sent() == chunk) return false;
  const Descriptor& theirs = channel_.descriptors[chunk % channel_slots];
  if (match_transfer(theirs, descriptor_)) return true;
  report_mismatch(shared_, rank_, descriptor_, peer_, theirs);
  return false;
}

}  // namespace softgpu::nccl
