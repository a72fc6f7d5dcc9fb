#include "softgpu/runtime/shared_recordings.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <ctime>

namespace softgpu {
namespace {

constexpr std::size_t page_bytes = 4096;
constexpr std::uint64_t slots = 509;
// A process that waits hears of its device's failure by looking.
constexpr timespec between_looks{0, 100'000'000};

}  // namespace

// As zeros it is an event that was never recorded. A recording has its number's slot until it is finished:
// then its number stands there, until the one that comes `slots` later replaces it.
struct SharedRecordings::Page {
  std::atomic<std::uint64_t> newest;
  std::atomic<std::uint32_t> bell;  // rung whenever a recording is finished
  std::atomic<std::uint64_t> finished[slots];
};

std::uint64_t SharedRecordings::newest() const { return page_->newest; }

std::uint64_t SharedRecordings::begin() {
  std::uint64_t newest = page_->newest;
  do {
    const std::uint64_t number = newest + 1;
    require(number <= slots || page_->finished[number % slots] >= number - slots,
            cudaErrorLaunchOutOfResources,
            "more than 509 recordings of one event between processes are unfinished");
  } while (!page_->newest.compare_exchange_weak(newest, newest + 1));
  return newest + 1;
}

void SharedRecordings::finish(std::uint64_t number) {
  page_->finished[number % slots] = number;
  ++page_->bell;
  syscall(SYS_futex, &page_->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// The page of an event that its creator has destroyed reads as zeros: nobody must wait for it any more.
bool SharedRecordings::finished(std::uint64_t number) const {
  return page_->finished[number % slots] >= number || page_->newest < number;
}

void SharedRecordings::wait(std::uint64_t number, const Device& waiting) const {
  while (!waiting.failed()) {
    const std::uint32_t heard = page_->bell;
    if (finished(number)) return;
    syscall(SYS_futex, &page_->bell, FUTEX_WAIT, heard, &between_looks, nullptr, 0);
  }
}

namespace {

template <class Page>
Page* page_at(void* memory) {
  static_assert(sizeof(Page) <= page_bytes && std::atomic<std::uint64_t>::is_always_lock_free);
  return static_cast<Page*>(memory);
}

}  // namespace

std::shared_ptr<SharedRecordings> SharedRecordings::create() {
  struct Own final : SharedRecordings {
    explicit Own(std::uint64_t place)
        : SharedRecordings(page_at<Page>(PublishedFile::get().map(place, page_bytes, nullptr))),
          place(place) {}
    ~Own() override {
      munmap(page_, page_bytes);
      PublishedFile::get().give_back(place, page_bytes);
    }
    SharedPiece publish(int device) const override {
      return PublishedFile::get().publish(SharedPiece::Kind::event, device, place, page_bytes);
    }
    const std::uint64_t place;
  };
  return std::make_shared<Own>(PublishedFile::get().reserve(page_bytes));
}

std::shared_ptr<SharedRecordings> SharedRecordings::open(const SharedPiece& piece) {
  struct Foreign final : SharedRecordings {
    explicit Foreign(const SharedPiece& piece)
        : SharedRecordings(page_at<Page>(map_foreign(piece, nullptr))) {}
    ~Foreign() override { munmap(page_, page_bytes); }
    SharedPiece publish(int) const override {
      throw CudaFailure{cudaErrorInvalidResourceHandle,
                        "an event of another process can only be shared on by that process"};
    }
  };
  require(piece.bytes == page_bytes, cudaErrorInvalidValue, "the handle is damaged");
  return std::make_shared<Foreign>(piece);
}

}  // namespace softgpu
