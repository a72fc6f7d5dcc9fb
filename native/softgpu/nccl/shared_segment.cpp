#include "softgpu/nccl/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "softgpu/nccl/failure.h"

namespace softgpu::nccl {
namespace {

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

struct Layout {
  explicit Layout(int ranks) {
    const size_t n = ranks;
    states = 64;
    channels = states + n * sizeof(RankState);
    slot_data = (channels + n * n * sizeof(Channel) + 4095) / 4096 * 4096;
    channel_data = slot_data + n * 2 * slots * slot_bytes;
    bytes = channel_data + n * n * channel_slots * channel_slot_bytes;
  }
  size_t states, channels, slot_data, channel_data, bytes;
};

}  // namespace

FileDescriptor SharedSegment::create(int ranks) {
  FileDescriptor file(memfd_create("softgpu-nccl", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file || ftruncate(file.get(), static_cast<off_t>(Layout(ranks).bytes)) != 0 ||
      fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw NcclFailure(ncclSystemError, "No shared memory for a communicator of ", ranks,
                      " ranks (memfd_create: ", std::strerror(errno), ").");
  }
  return file;
}

SharedSegment::SharedSegment(const FileDescriptor& file, int ranks)
    : SharedSegment(MAP_SHARED, file.get(), ranks) {}

SharedSegment::SharedSegment(int ranks) : SharedSegment(MAP_PRIVATE | MAP_ANONYMOUS, -1, ranks) {}

SharedSegment::SharedSegment(int flags, int file, int ranks) : ranks_(ranks) {
  const Layout layout(ranks);
  void* memory = mmap(nullptr, layout.bytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, file, 0);
  if (memory == MAP_FAILED) {
    throw NcclFailure(ncclSystemError, "Cannot map the ", layout.bytes, " bytes that a communicator of ",
                      ranks, " ranks shares (mmap: ", std::strerror(errno), ").");
  }
  memory_ = static_cast<std::byte*>(memory);
  mismatch_reported_ = reinterpret_cast<std::atomic<bool>*>(memory_);
  states_ = reinterpret_cast<RankState*>(memory_ + layout.states);
  channels_ = reinterpret_cast<Channel*>(memory_ + layout.channels);
  slot_data_ = memory_ + layout.slot_data;
  channel_data_ = memory_ + layout.channel_data;
}

SharedSegment::~SharedSegment() { munmap(memory_, Layout(ranks_).bytes); }

}  // namespace softgpu::nccl
