#include "together.h"

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

#include "futex.h"

namespace jitckpt::proxy {

std::unique_ptr<Together> Together::of_environment() {
  const char* const path = std::getenv("JITCKPT_PROXY_TOGETHER");
  if (!path || !*path) return nullptr;
  const char* const rank = std::getenv("RANK");
  return std::make_unique<Together>(path, rank ? std::strtoull(rank, nullptr, 10) : 0);
}

Together::Together(const std::string& path, uint64_t rank) : rank_(rank) {
  const auto failed = [&](const std::string& why) {
    return std::runtime_error("The step barrier can't be used at JITCKPT_PROXY_TOGETHER=" + path + ": " +
                              why + ".");
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
  if (head().magic == magic && rank_ < head().ranks && head().ranks <= (bytes_ - words_begin) / sizeof(Word))
    return;
  munmap(begin_, bytes_);
  throw failed("it is no barrier's memory, or not for rank " + std::to_string(rank_));
}

Together::~Together() { munmap(begin_, bytes_); }

void Together::wake(uint64_t rank) {
  std::atomic<uint32_t>& happenings = words()[rank].happenings;
  happenings.fetch_add(1);
  futex_wake_all(happenings);
}

// Two that come at the same time each see both, or the later one does.
void Together::come(uint64_t recovery, uint64_t step) {
  words()[rank_].recovery_and_step = joined(recovery, step);
  for (uint64_t rank = 0; rank < head().ranks; ++rank) {
    if (rank != rank_ && all_have_come(words()[rank].recovery_and_step)) wake(rank);
  }
}

bool Together::all_have_come(uint64_t recovery, uint64_t step) const {
  return all_have_come(joined(recovery, step));
}

bool Together::all_have_come(uint64_t recovery_and_step) const {
  // A rank of a newer recovery has gone back: it does not count, until it has come again.
  const uint64_t next_recovery = joined((recovery_and_step >> step_bits) + 1, 0);
  return std::ranges::all_of(std::span(words(), head().ranks), [&](const Word& word) {
    const uint64_t come = word.recovery_and_step;
    return come >= recovery_and_step && come < next_recovery;
  });
}

void Together::leave_after(uint64_t step) {
  uint64_t none = 0;
  head().whole_from.compare_exchange_strong(none, step + 2);
}

uint64_t Together::whole_from() const { return head().whole_from; }

void Together::leave() {
  head().left = 1;
  for (uint64_t rank = 0; rank < head().ranks; ++rank) wake(rank);
}

bool Together::has_been_left() const { return head().left != 0; }

uint32_t Together::happenings() const { return words()[rank_].happenings; }

void Together::wait(uint32_t seen, std::chrono::milliseconds longest) const {
  futex_wait(words()[rank_].happenings, seen, longest);
}

}  // namespace jitckpt::proxy
