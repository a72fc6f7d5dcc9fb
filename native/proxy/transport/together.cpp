#include "proxy/transport/together.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <span>
#include <stdexcept>

#include "ground/environment.h"
#include "proxy/transport/futex.h"

namespace jitckpt::proxy {

namespace {

// Behind a recovery, which others may not have come to.
constexpr uint64_t next_recovery(uint64_t recovery_and_step) {
  return ((recovery_and_step >> Together::step_bits) + 1) << Together::step_bits;
}

}  // namespace

std::unique_ptr<Together> Together::of_environment() {
  const char* const value = read(environment::proxy_together);
  if (!value) return nullptr;
  const std::string text = value;
  const std::size_t mark = text.rfind('#');
  if (mark == std::string::npos)
    throw std::runtime_error(std::string(environment::proxy_together.name) + "=" + text +
                             " does not say which rank this is.");
  return std::make_unique<Together>(text.substr(0, mark), std::strtoull(value + mark + 1, nullptr, 10));
}

Together::Together(const std::string& path, uint64_t rank) : rank_(rank) {
  const auto failed = [&](const std::string& why) {
    return std::runtime_error(std::string("The step barrier can't be used at ") +
                              environment::proxy_together.name + "=" + path + ": " + why + ".");
  };
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) throw failed(std::strerror(errno));
  struct stat status{};
  const bool seen = fstat(file, &status) == 0;
  bytes_ = seen ? static_cast<std::size_t>(status.st_size) : 0;
  void* const memory =
      bytes_ > words_begin ? mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  close(file);
  if (memory == MAP_FAILED) throw failed("it is no barrier's memory");
  begin_ = static_cast<std::byte*>(memory);
  if (head().magic == magic && (rank_ < head().ranks || rank_ == agent) &&
      head().ranks <= (bytes_ - words_begin) / sizeof(Word))
    return;
  munmap(begin_, bytes_);
  throw failed("it is no barrier's memory, or not for rank " + std::to_string(rank_));
}

Together::~Together() { munmap(begin_, bytes_); }

void Together::wake(uint64_t rank) {
  std::atomic<uint32_t>& happenings = happenings_of(rank);
  happenings.fetch_add(1);
  futex_wake_all(happenings);
}

void Together::wake_all() {
  for (uint64_t rank = 0; rank < head().ranks; ++rank) wake(rank);
  if (head().hosts > 1) wake(agent);
}

// Two that come at the same time each see both, or the later one does.
void Together::come(uint64_t recovery, uint64_t step) {
  const uint64_t come = words()[rank_].recovery_and_step = joined(recovery, step);
  for (uint64_t rank = 0; rank < head().ranks; ++rank) {
    if (rank != rank_ && all_have_come(words()[rank].recovery_and_step)) wake(rank);
  }
  if (head().hosts > 1 && all_here_have_come(come)) wake(agent);
}

bool Together::all_have_come(uint64_t recovery, uint64_t step) const {
  return all_have_come(joined(recovery, step));
}

// A rank of a newer recovery has gone back: it does not count, until it has come again.
bool Together::all_here_have_come(uint64_t recovery_and_step) const {
  return std::ranges::all_of(std::span(words(), head().ranks), [&](const Word& word) {
    const uint64_t come = word.recovery_and_step;
    return come >= recovery_and_step && come < next_recovery(recovery_and_step);
  });
}

bool Together::all_have_come(uint64_t recovery_and_step) const {
  if (!all_here_have_come(recovery_and_step)) return false;
  const uint64_t come = head().everywhere;
  return head().hosts == 1 || (come >= recovery_and_step && come < next_recovery(recovery_and_step));
}

// Its words first: who had something to say before it came has said it by then.
Together::Come Together::here() const {
  uint64_t least = ~uint64_t{0}, most = 0;
  for (const Word& word : std::span(words(), head().ranks)) {
    const uint64_t come = word.recovery_and_step;
    least = std::min(least, come);
    most = std::max(most, come);
  }
  return {most < next_recovery(least) ? least : 0, head().whole_from, head().left != 0};
}

// Its step last: who goes on has heard all that was said before it.
void Together::everywhere(const Come& come) {
  if (come.left && head().left.exchange(1) == 0) wake_all();
  uint64_t before = head().whole_from;
  while (come.whole_from != 0 && (before == 0 || come.whole_from < before) &&
         !head().whole_from.compare_exchange_weak(before, come.whole_from)) {
  }
  if (head().everywhere >= come.recovery_and_step) return;
  head().everywhere = come.recovery_and_step;
  for (uint64_t rank = 0; rank < head().ranks; ++rank) {
    if (all_have_come(words()[rank].recovery_and_step)) wake(rank);
  }
}

void Together::leave_after(uint64_t step) {
  uint64_t none = 0;
  if (head().whole_from.compare_exchange_strong(none, step + 2) && head().hosts > 1) wake(agent);
}

uint64_t Together::whole_from() const { return head().whole_from; }

void Together::leave() {
  head().left = 1;
  wake_all();
}

bool Together::has_been_left() const { return head().left != 0; }

uint32_t Together::happenings() const { return happenings_of(rank_); }

void Together::wait(uint32_t seen, std::chrono::milliseconds longest) const {
  futex_wait(happenings_of(rank_), seen, longest);
}

}  // namespace jitckpt::proxy
