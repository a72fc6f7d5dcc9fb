#include "proxy/client/validation.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "proxy/client/connection.h"
#include "proxy/client/jitckpt_proxy.h"
#include "proxy/client/requests.h"

namespace jitckpt::proxy::client {

constexpr std::chrono::milliseconds between_looks(500);

std::size_t blocks_of(std::size_t bytes) { return (bytes + wire::block_bytes - 1) / wire::block_bytes; }

Validation::Heard Validation::say(control::Validates what, const std::function<void()>& look) {
  std::unique_lock lock(mutex_);
  if (over_) return Heard::over;
  place_ = what.place;
  says_ = what.says;
  said_ = std::move(what);
  waits_ = true;
  news_();
  while (!changed_.wait_for(lock, between_looks, [this] { return over_ || !waits_; })) {
    if (says_ == says_rests) continue;  // all rest, and some may have no server
    lock.unlock();
    look();
    lock.lock();
  }
  return over_ ? Heard::over : heard_;
}

void Validation::begin(std::function<void()> news) {
  std::lock_guard lock(mutex_);
  news_ = std::move(news);
  over_ = false;
}

std::optional<control::Validates> Validation::take() {
  std::lock_guard lock(mutex_);
  return std::exchange(said_, std::nullopt);
}

void Validation::hear(Heard heard) {
  std::lock_guard lock(mutex_);
  if (heard == Heard::over) over_ = true;
  said_.reset();  // it is said anew, if there is still something to say
  heard_ = heard;
  waits_ = false;
  changed_.notify_all();
}

void Validation::hear_of(uint64_t place, Heard heard) {
  {
    std::lock_guard lock(mutex_);
    if (place != place_) return;
  }
  hear(heard);
}

bool Validation::rests() {
  std::lock_guard lock(mutex_);
  return waits_ && says_ == says_rests;
}

namespace {

LogWriter::Apart set_to(uint8_t byte, const Allocation& memory) {
  const wire::fill arguments{memory.address, memory.bytes, memory.bytes, 1, 0, byte, no_copy_flag};
  const Bytes content = bytes_of(arguments);
  return {static_cast<uint16_t>(Call::fill), memory.device, {content.begin(), content.end()}};
}

}  // namespace

std::vector<LogWriter::Apart> Connection::Image::filling(uint8_t byte) const {
  const Extents copied(held, memory_of);
  std::vector<LogWriter::Apart> calls;
  for (const Allocation& one : memory) {
    copied.outside(one.extent(), [&](const Extent& part) {
      calls.push_back(set_to(byte, {part.begin, part.end - part.begin, one.device}));
    });
  }
  return calls;
}

std::vector<LogWriter::Apart> Check::overwriting() const {
  std::vector<LogWriter::Apart> calls;
  std::size_t first = 0;
  for (const wire::Piece& piece : pieces) {
    const std::size_t count = blocks_of(piece.bytes);
    const auto is_overwritten = [&](std::size_t block) {
      return piece.image != 0 && changed[first + block] != 0 && kept[first + block] == 0;
    };
    for (std::size_t block = 0; block < count;) {
      std::size_t end = block;
      while (end < count && is_overwritten(end)) ++end;
      if (end != block) {
        const std::size_t begin = block * wire::block_bytes;
        const std::size_t bytes = std::min<std::size_t>(end * wire::block_bytes, piece.bytes) - begin;
        calls.push_back(set_to(wire::overwritten, {piece.address + begin, bytes, piece.device}));
      }
      block = end + 1;
    }
    first += count;
  }
  return calls;
}

// What was held when the minibatch began, and what is held now; by address.
std::vector<wire::Piece> Connection::pieces_to_check(const Image& image) {
  const std::vector<Allocation> memory = objects_.allocations();
  const Extents living(memory, &Allocation::extent), was_there(image.memory, &Allocation::extent);
  const Extents was_held(image.held, memory_of);
  std::vector<wire::Piece> pieces;
  // Where places of the state end within a block, the rest of it is a piece of its own: so no block has
  // memory of two tensors, which allocators begin at whole ones.
  const auto add = [&pieces](const Extent& part, uint64_t was, int32_t device, bool filled) {
    const uint64_t next = (part.begin + wire::block_bytes - 1) / wire::block_bytes * wire::block_bytes;
    const uint64_t edge = std::min(next, part.end);
    if (edge > part.begin) pieces.push_back({part.begin, was, 0, 0, edge - part.begin, device, filled});
    if (part.end > edge)
      pieces.push_back({edge, was ? was + (edge - part.begin) : 0, 0, 0, part.end - edge, device, filled});
  };
  for (const wire::Range& range : image.held) {
    living.inside(memory_of(range), [&](const Extent& part) {
      add(part, range.to + (part.begin - range.from), range.device, false);
    });
  }
  const std::lock_guard lock(free_memory().mutex);
  for (const Allocation& held : free_memory().held(memory)) {
    was_held.outside(held.extent(), [&](const Extent& part) {
      was_there.inside(part, [&](const Extent& filled) { add(filled, 0, held.device, true); });
      was_there.outside(part, [&](const Extent& made) { add(made, 0, held.device, false); });
    });
  }
  std::ranges::sort(pieces, {}, &wire::Piece::address);
  return pieces;
}

// The next check, with room for the copy; null if there is none.
std::unique_ptr<Check> Connection::begin_check(const Image& image) {
  auto made = std::make_unique<Check>();
  made->number = ++checks_;
  made->state = image.state;
  made->pieces = pieces_to_check(image);
  std::size_t bytes = 0;
  for (wire::Piece& piece : made->pieces) {
    piece.copy = bytes;
    piece.found = made->blocks;
    made->blocks += blocks_of(piece.bytes);
    bytes += blocks_of(piece.bytes) * wire::block_bytes;
  }
  made->copy = pinned_.allocate(bytes);
  made->found = static_cast<wire::Found*>(pinned_.allocate(made->blocks));
  if (!made->copy || !made->found) {
    if (made->copy) pinned_.release(made->copy);
    if (made->found) pinned_.release(made->found);
    return nullptr;
  }
  for (wire::Piece& piece : made->pieces) {
    piece.copy += reinterpret_cast<uint64_t>(made->copy);
    piece.found += reinterpret_cast<uint64_t>(made->found);
  }
  note_image_bytes(bytes);
  return made;
}

void Check::compare_with_image() {
  changed.assign(blocks, 1);
  std::size_t block = 0;
  for (const wire::Piece& piece : pieces) {
    for (uint64_t done = 0; done < piece.bytes; done += wire::block_bytes, ++block) {
      if (piece.image == 0) continue;
      changed[block] = std::memcmp(reinterpret_cast<const void*>(piece.image + done),
                                   reinterpret_cast<const void*>(piece.copy + done),
                                   std::min(wire::block_bytes, piece.bytes - done)) != 0;
    }
  }
}

// The program's thread alone makes checks; the control thread reads them while it recovers.
cudaError_t Connection::check(jitckpt_proxy_memory& memory) {
  if (!hold_.on() || images_.empty() || images_.back().state == 0)
    return cudaError_t(fail(Library::cudart, cudaErrorNotSupported, "there is no minibatch to go back to"));
  if (const cudaError_t result = wait_for_newest_image(); result != cudaSuccess) return result;
  end_check();
  const Image& image = images_.back();
  std::unique_ptr<Check> made = begin_check(image);
  if (!made)
    return cudaError_t(fail(Library::cudart, cudaErrorMemoryAllocation,
                            "no room for a copy of the device's memory: raise JITCKPT_PROXY_PINNED_BYTES"));
  Check& check = *made;
  hold_.when_free([&] {
    std::lock_guard lock(mutex_);
    check_ = std::move(made);
  });
  wire::check_memory_answer newest{};
  const auto result =
      ask<cudaError_t>(Call::check_memory, wire::check_memory{check.number, check.pieces.size()}, newest,
                       std::as_bytes(std::span(check.pieces)));
  if (result != cudaSuccess) return result;
  if (newest.check < check.number)
    return cudaError_t(
        fail(Library::cudart, cudaErrorUnknown, "the device's memory could not be copied to the host"));
  if (!writer_.is_kept(image.start.sequence))
    return cudaError_t(fail(Library::cudart, cudaErrorNotSupported,
                            "this minibatch's calls outgrow the log: raise JITCKPT_PROXY_LOG_BYTES"));
  check.compare_with_image();
  check.kept.assign(check.blocks, 0);
  for (const wire::Piece& piece : check.pieces) check.places.push_back({piece.address, piece.bytes});
  memory = {check.places.size(),  check.places.data(), check.blocks,
            check.changed.data(), check.kept.data(),   reinterpret_cast<const unsigned char*>(check.found)};
  return cudaSuccess;
}

jitckpt_proxy_validation Connection::validate(const control::Validates& says) {
  const Validation::Heard heard = validation_.say(says, [this] {
    hold_.pass();
    ask_bytes_quietly(Call::cudaStreamQuery, bytes_of(wire::cudaStreamQuery{}), {});
  });
  if (heard == Validation::Heard::again) {
    std::lock_guard lock(mutex_);
    if (!check_ || log_.control().check_compared != check_->number) return jitckpt_proxy_unknown;
    return check_->overwrites ? jitckpt_proxy_overwritten : jitckpt_proxy_put_back;
  }
  end_check();
  if (heard == Validation::Heard::valid) return jitckpt_proxy_valid;
  if (heard == Validation::Heard::stays) return jitckpt_proxy_valid_stays;
  if (heard == Validation::Heard::left_out) return jitckpt_proxy_left_out;
  if (!hold_.given_up().empty()) forget_images(0);
  return jitckpt_proxy_over;
}

void Connection::end_check() {
  std::unique_ptr<Check> ended;
  hold_.when_free([&] {
    std::lock_guard lock(mutex_);
    ended = std::move(check_);
  });
  if (!ended) return;
  // The call is made again, as long as its record is kept.
  release_pinned(ended->copy);
  release_pinned(ended->found);
}

}  // namespace jitckpt::proxy::client

using namespace jitckpt::proxy;
using namespace jitckpt::proxy::client;

int jitckpt_proxy_check(struct jitckpt_proxy_memory* memory) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::cudart, result);
  return connection ? connection->check(*memory) : result;
}

int jitckpt_proxy_validate(uint64_t place, int says, const char* text, const char* digest,
                           const char* unfit) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::cudart, result);
  return connection ? connection->validate({place, static_cast<uint64_t>(says), text, digest, unfit})
                    : jitckpt_proxy_over;
}

const char* jitckpt_proxy_given_up(void) {
  static thread_local std::string reason;
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::cudart, result);
  reason = connection ? connection->hold().given_up() : "";
  return reason.c_str();
}
