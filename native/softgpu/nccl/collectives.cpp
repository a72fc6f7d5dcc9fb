#include "softgpu/nccl/collectives.h"

#include <algorithm>
#include <cstring>

#include "softgpu/nccl/mismatch.h"
#include "softgpu/nccl/reduce_kernels.h"
#include "softgpu/runtime/enqueue.h"

namespace softgpu::nccl {
namespace {

// What is folded at a time, so that the accumulator stays in the first-level cache.
constexpr size_t fold_bytes = 8192;

// One slot holds a block for each rank, or one for all.
bool has_blocks(Kind kind) {
  return kind == Kind::reduce_scatter || kind == Kind::all_to_all || kind == Kind::scatter;
}

size_t chunk_elements(const Operation& operation, int ranks) {
  const size_t bytes = has_blocks(operation.kind) ? slot_bytes / ranks : slot_bytes;
  return bytes / size_of(operation.type);
}

}  // namespace

Collective::Collective(Communicator& communicator, const Operation& operation)
    : operation_(operation),
      shared_(communicator.shared()),
      links_(communicator.links()),
      rank_(communicator.rank()),
      ranks_(communicator.ranks()),
      first_reduced_(communicator.first_reduced()),
      mine_(shared_.rank(rank_)),
      descriptor_(describe(operation, ++communicator.collectives)),
      element_size_(size_of(operation.type)),
      scales_(operation.reduction.operation == pre_multiplied_sum),
      chunk_elements_(chunk_elements(operation, ranks_)),
      send_(static_cast<std::byte*>(shadow(operation.send))),
      receive_(static_cast<std::byte*>(shadow(operation.receive))),
      first_(communicator.chunks),
      end_(first_ + (operation.count + chunk_elements_ - 1) / chunk_elements_),
      written_(first_),
      reduced_(first_),
      collected_(first_) {
  communicator.chunks = end_;
}

bool Collective::step() {
  if (may_collect()) {
    collect();
    mine_.done = ++collected_;
    tell_others(News::Counter::done, collected_ - 1);
  } else if (may_reduce()) {
    reduce();
    mine_.reduced = ++reduced_;
    if (shares_results()) tell_others(News::Counter::reduced, reduced_ - 1);
  } else if (may_write()) {
    write();
    mine_.descriptors[written_ % slots] = descriptor_;
    mine_.written = ++written_;
    tell_others(News::Counter::written, written_ - 1);
  } else {
    return false;
  }
  return true;
}

const RankLink* Collective::lost_peer() const {
  const auto lost = std::find_if(links_.begin(), links_.end(), [&](const RankLink& link) {
    return link.has_ended() && link.done() < end_;  // in this order: it may tell that and end
  });
  return lost == links_.end() ? nullptr : &*lost;
}

bool Collective::may_write() const {
  if (written_ == end_) return false;
  return std::all_of(links_.begin(), links_.end(),
                     [&](const RankLink& link) { return link.done() + slots > written_; });
}

bool Collective::may_reduce() const {
  if (reduced_ == written_) return false;
  return !reduces(operation_.kind) || has_contributions(reduced_);
}

bool Collective::may_collect() const {
  if (collected_ == reduced_) return false;
  const bool is_root = rank_ == operation_.peer;
  switch (operation_.kind) {
    case Kind::reduce:
      if (!is_root) return true;
      [[fallthrough]];
    case Kind::all_reduce:
      return std::all_of(links_.begin(), links_.end(),
                         [&](const RankLink& link) { return link.reduced() > collected_; });
    case Kind::broadcast:
    case Kind::scatter:
      return is_root || has_contribution(operation_.peer, collected_);
    case Kind::gather:
      return !is_root || has_contributions(collected_);
    case Kind::all_gather:
    case Kind::all_to_all:
      return has_contributions(collected_);
    default:
      return true;
  }
}

// Those of another call than ours don't count, so that the communicator hangs and computes no wrong number.
bool Collective::has_contribution(int rank, uint64_t chunk) const {
  if (links_[rank].written() <= chunk) return false;
  const Descriptor& theirs = links_[rank].descriptor(chunk);
  if (match(descriptor_, theirs)) return true;
  report_mismatch(shared_, rank_, descriptor_, rank, theirs);
  return false;
}

bool Collective::has_contributions(uint64_t chunk) const {
  for (int rank = 0; rank < ranks_; ++rank) {
    if (!has_contribution(rank, chunk)) return false;
  }
  return true;
}

void Collective::write() {
  const Range range = chunk_range(written_);
  std::byte* slot = shared_.contribution(rank_, written_);
  const bool is_root = rank_ == operation_.peer;
  switch (operation_.kind) {
    case Kind::all_reduce:
    case Kind::reduce: {
      // A rank reduces its own part itself, so it need not write that down as it is.
      const Range own = scales_ ? Range{range.end, range.end} : part_of(range, rank_);
      contribute(slot, sent(range.begin), own.begin - range.begin);
      contribute(slot + (own.end - range.begin) * element_size_, sent(own.end), range.end - own.end);
      return;
    }
    case Kind::broadcast:
      if (is_root) copy(slot, sent(range.begin), range.count());
      return;
    case Kind::gather:
      if (!is_root) copy(slot, sent(range.begin), range.count());
      return;
    case Kind::all_gather:
      copy(slot, sent(range.begin), range.count());
      return;
    case Kind::scatter:
      if (!is_root) return;
      [[fallthrough]];
    default:  // reduce_scatter, all_to_all
      for (int rank = 0; rank < ranks_; ++rank) {
        if (rank == rank_ && !scales_) continue;
        contribute(slot + rank * chunk_elements_ * element_size_, sent(rank * operation_.count + range.begin),
                   range.count());
      }
  }
}

void Collective::reduce() {
  if (!reduces(operation_.kind)) return;
  const Range range = chunk_range(reduced_);
  if (operation_.kind == Kind::reduce_scatter) {
    fold(sent(rank_ * operation_.count + range.begin), rank_ * chunk_elements_ * element_size_, range.count(),
         nullptr, received(range.begin));
    return;
  }
  const Range own = part_of(range, rank_);
  const size_t offset = (own.begin - range.begin) * element_size_;
  const bool keeps = operation_.kind == Kind::all_reduce || rank_ == operation_.peer;
  const bool gives = operation_.kind == Kind::all_reduce || rank_ != operation_.peer;
  fold(sent(own.begin), offset, own.count(), gives ? shared_.result(rank_, reduced_) + offset : nullptr,
       keeps ? received(own.begin) : nullptr);
}

void Collective::collect() {
  const Range range = chunk_range(collected_);
  const bool is_root = rank_ == operation_.peer;
  const auto take = [&](size_t to, int from, size_t slot_offset) {
    copy(received(to), links_[from].contribution(collected_) + slot_offset, range.count());
  };
  const auto keep_own = [&](size_t to, size_t from) {
    if (received(to) != sent(from)) copy(received(to), sent(from), range.count());
  };
  switch (operation_.kind) {
    case Kind::reduce:
      if (!is_root) return;
      [[fallthrough]];
    case Kind::all_reduce:
      for (int rank = 0; rank < ranks_; ++rank) {
        if (rank == rank_) continue;
        const Range part = part_of(range, rank);
        copy(received(part.begin),
             links_[rank].result(collected_) + (part.begin - range.begin) * element_size_, part.count());
      }
      return;
    case Kind::broadcast:
      return is_root ? keep_own(range.begin, range.begin) : take(range.begin, operation_.peer, 0);
    case Kind::scatter:
      return is_root ? keep_own(range.begin, rank_ * operation_.count + range.begin)
                     : take(range.begin, operation_.peer, rank_ * chunk_elements_ * element_size_);
    case Kind::gather:
      if (!is_root) return;
      [[fallthrough]];
    case Kind::all_gather:
    case Kind::all_to_all: {
      const bool blocks = has_blocks(operation_.kind);
      for (int rank = 0; rank < ranks_; ++rank) {
        const size_t to = rank * operation_.count + range.begin;
        if (rank == rank_) {
          keep_own(to, blocks ? to : range.begin);
        } else {
          take(to, rank, blocks ? rank_ * chunk_elements_ * element_size_ : 0);
        }
      }
      return;
    }
    default:
      return;  // a reduce-scatter has its result already
  }
}

Collective::Range Collective::chunk_range(uint64_t chunk) const {
  const size_t begin = (chunk - first_) * chunk_elements_;
  return {begin, std::min(begin + chunk_elements_, operation_.count)};
}

// Parts start on cache lines, so that no two ranks write to one.
Collective::Range Collective::part_of(const Range& range, int rank) const {
  const size_t line = 64 / element_size_;
  const size_t part = ((range.count() + ranks_ - 1) / ranks_ + line - 1) / line * line;
  const size_t begin = std::min(range.begin + rank * part, range.end);
  return {begin, std::min(begin + part, range.end)};
}

void Collective::copy(std::byte* to, const std::byte* from, size_t elements) const {
  if (elements != 0) std::memcpy(to, from, elements * element_size_);
}

void Collective::contribute(std::byte* to, const std::byte* from, size_t elements) const {
  if (!scales_) return copy(to, from, elements);
  const void* scalar = operation_.reduction.device_scalar ? shadow(operation_.reduction.device_scalar)
                                                          : operation_.reduction.host_scalar.data();
  multiply(operation_.type, to, from, scalar, elements);
}

// The fixed order: see reduce_kernels.h and reduction_order.h. Block by block, so that a result is in the
// first-level cache until it is where it has to go, and is written only after the inputs it may lie on were
// read.
void Collective::fold(const std::byte* own, size_t slot_offset, size_t elements, std::byte* shared_result,
                      std::byte* own_result) const {
  alignas(64) std::byte result[fold_bytes];
  const size_t block = fold_bytes / element_size_;
  for (size_t begin = 0; begin < elements; begin += block) {
    const size_t count = std::min(block, elements - begin);
    const size_t offset = begin * element_size_;
    for (int turn = 0; turn < ranks_; ++turn) {
      const int rank = (first_reduced_ + turn) % ranks_;
      const std::byte* source = rank == rank_ && !scales_
                                    ? own + offset
                                    : links_[rank].contribution(reduced_) + slot_offset + offset;
      if (turn == 0) {
        copy(result, source, count);
      } else {
        combine(operation_.type, operation_.reduction.operation, result, source, count);
      }
    }
    if (operation_.reduction.operation == ncclAvg) divide(operation_.type, result, ranks_, count);
    if (shared_result) copy(shared_result + offset, result, count);
    if (own_result) copy(own_result + offset, result, count);
  }
}

// What the other rank is going to read of this rank's contribution, or of its result.
Collective::Bytes Collective::read_by(int rank, News::Counter counter, const Range& range) const {
  const bool is_root = rank_ == operation_.peer, to_root = rank == operation_.peer;
  const auto bytes_of = [&](const Range& part) {
    return Bytes{(part.begin - range.begin) * element_size_, part.count() * element_size_};
  };
  if (counter == News::Counter::reduced) {
    return operation_.kind == Kind::all_reduce || to_root ? bytes_of(part_of(range, rank_)) : Bytes{};
  }
  switch (operation_.kind) {
    case Kind::all_reduce:
    case Kind::reduce:
      return bytes_of(part_of(range, rank));
    case Kind::broadcast:
      return is_root ? bytes_of(range) : Bytes{};
    case Kind::gather:
      return to_root ? bytes_of(range) : Bytes{};
    case Kind::all_gather:
      return bytes_of(range);
    case Kind::scatter:
      if (!is_root) return {};
      [[fallthrough]];
    default:  // reduce_scatter, all_to_all
      return {rank * chunk_elements_ * element_size_, range.count() * element_size_};
  }
}

void Collective::tell_others(News::Counter counter, uint64_t chunk) const {
  const Range range = chunk_range(chunk);
  for (const RankLink& link : links_) {
    if (link.peer() == rank_) continue;
    const Bytes bytes = counter == News::Counter::done ? Bytes{} : read_by(link.peer(), counter, range);
    link.tell({.counter = counter,
               .offset = static_cast<uint32_t>(bytes.offset),
               .bytes = static_cast<uint32_t>(bytes.count),
               .value = chunk + 1,
               .descriptor = descriptor_});
  }
}

}  // namespace softgpu::nccl
