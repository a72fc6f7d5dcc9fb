// One collective, moved on chunk by chunk by whoever calls step().
//
// Every chunk passes three stages on every rank: write (the rank puts its contribution into its slot), reduce
// (it reduces its own part of the chunk from everybody's slots, in the order of the ranks) and collect (it
// takes what it needs from the others' slots). So all ranks share the work of a reduction, and a slot is used
// again as soon as every rank has collected. Where nothing is computed, the second stage is empty.
#pragma once
#include "softgpu/nccl/communicator.h"
#include "softgpu/nccl/operation.h"

namespace softgpu::nccl {

class Collective {
 public:
  // Takes the next number and the next chunks of the communicator: make them in the order of the calls.
  Collective(Communicator& communicator, const Operation& operation);

  // Does what can be done without waiting; false if that was nothing.
  bool step();
  bool finished() const { return collected_ == end_; }

  // Of another host, if its connection has ended before its part of this was done; else null.
  const RankLink* lost_peer() const;

 private:
  // Elements [begin, end) of each block that the operation counts: the chunk, or a rank's part of it.
  struct Range {
    size_t begin, end;
    size_t count() const { return end - begin; }
  };
  Range chunk_range(uint64_t chunk) const;
  Range part_of(const Range& range, int rank) const;

  bool may_write() const;
  bool may_reduce() const;
  bool may_collect() const;
  void write();
  void reduce();
  void collect();

  bool has_contribution(int rank, uint64_t chunk) const;
  bool has_contributions(uint64_t chunk) const;

  std::byte* sent(size_t element) const { return send_ + element * element_size_; }
  std::byte* received(size_t element) const { return receive_ + element * element_size_; }
  void copy(std::byte* to, const std::byte* from, size_t elements) const;
  void contribute(std::byte* to, const std::byte* from, size_t elements) const;
  void fold(const std::byte* own, size_t slot_offset, size_t elements, std::byte* shared_result,
            std::byte* own_result) const;

  struct Bytes {
    size_t offset, count;  // of a slot
  };
  Bytes read_by(int rank, News::Counter counter, const Range& range) const;
  void tell_others(News::Counter counter, uint64_t chunk) const;
  bool shares_results() const {
    return operation_.kind == Kind::all_reduce || operation_.kind == Kind::reduce;
  }

  const Operation operation_;
  SharedSegment& shared_;
  const std::vector<RankLink>& links_;
  const int rank_, ranks_, first_reduced_;
  RankState& mine_;
  const Descriptor descriptor_;
  const size_t element_size_;
  const bool scales_;            // the contributions are not what was sent, but multiples of it
  const size_t chunk_elements_;  // of each block
  std::byte* const send_;
  std::byte* const receive_;
  const uint64_t first_, end_;              // chunks, as the communicator counts them
  uint64_t written_, reduced_, collected_;  // the chunk that comes next in each stage
};

}  // namespace softgpu::nccl
