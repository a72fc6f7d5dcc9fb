// The memory that the ranks of one communicator share. It has no name in the file system: it is a memfd, and
// goes with the last process that maps it, however that ends.
//
// It starts as zeros, which is a valid state of everything in it. Every counter has one writer and only
// grows. Memory that is not used is not there: the channels of pairs that never send cost nothing.
#pragma once
#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "softgpu/nccl/bell.h"
#include "softgpu/nccl/file_descriptor.h"
#include "softgpu/nccl/host.h"
#include "softgpu/nccl/operation.h"

namespace softgpu::nccl {

// Collectives move data in chunks through slots; each rank has `slots` of them to write its contribution to,
// and as many for what it has reduced.
constexpr size_t slots = 4;
constexpr size_t slot_bytes = size_t{256} << 10;
// Sends have slots of their own for each pair of ranks and each direction.
constexpr size_t channel_slots = 2;
constexpr size_t channel_slot_bytes = size_t{256} << 10;
constexpr int max_ranks = 1024;

// What ranks tell each other on the host when they make a communicator out of another.
struct HostMessage {
  enum class Purpose : uint32_t { join, split, share_id, shrink };
  Purpose purpose;
  int32_t color = 0, key = 0;
  ncclUniqueId id{};
  HostId host{};       // of the rank's device
  int64_t bus_id = 0;  // as NCCL counts: the PCI bus id's digits
};

struct alignas(64) RankState {
  Bell device_bell, host_bell;
  // Chunks since the communicator began, the same number on all ranks.
  alignas(64) std::atomic<uint64_t> written;  // this rank's contribution is in its slot
  alignas(64) std::atomic<uint64_t> reduced;  // this rank's part is in its result slot
  alignas(64) std::atomic<uint64_t> done;     // this rank needs nobody's slots of that chunk any more
  Descriptor descriptors[slots];              // of the collective whose chunk is in the slot
  alignas(64) std::atomic<uint64_t> host_rounds;
  HostMessage host_messages[2];  // of even and odd rounds
};

struct alignas(64) Channel {
  alignas(64) std::atomic<uint64_t> written;  // chunks, by the sender
  alignas(64) std::atomic<uint64_t> read;     // chunks, by the receiver
  Descriptor descriptors[channel_slots];      // of the send whose chunk is in the slot
};

class SharedSegment {
 public:
  static FileDescriptor create(int ranks);

  SharedSegment(const FileDescriptor& file, int ranks);
  explicit SharedSegment(int ranks);  // of this process alone
  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  RankState& rank(int rank) { return states_[rank]; }
  std::byte* contribution(int rank, uint64_t chunk) { return slot(2 * rank, chunk); }
  std::byte* result(int rank, uint64_t chunk) { return slot(2 * rank + 1, chunk); }

  Channel& channel(int from, int to) { return channels_[from * ranks_ + to]; }
  std::byte* channel_slot(int from, int to, uint64_t chunk) {
    return channel_data_ +
           ((size_t(from) * ranks_ + to) * channel_slots + chunk % channel_slots) * channel_slot_bytes;
  }

  // True for the first rank that asks: a mismatch is reported once.
  bool claim_mismatch_report() { return !mismatch_reported_->exchange(true); }

 private:
  SharedSegment(int flags, int file, int ranks);
  std::byte* slot(int row, uint64_t chunk) { return slot_data_ + (row * slots + chunk % slots) * slot_bytes; }

  int ranks_;
  std::byte* memory_;
  std::atomic<bool>* mismatch_reported_;
  RankState* states_;
  Channel* channels_;
  std::byte* slot_data_;
  std::byte* channel_data_;
};

}  // namespace softgpu::nccl
