#include "memory_tier/window.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "memory_tier/failure.h"

namespace jitckpt::memory_tier {
namespace {

[[noreturn]] void no_memory(const std::string& what) { throw ChunkFailure(Reason::no_memory, what); }

void refuse_what_may_shrink(int descriptor, uint64_t offset, uint64_t size) {
  struct stat file{};
  if (fstat(descriptor, &file) != 0) no_memory(std::strerror(errno));
  const auto length = static_cast<uint64_t>(file.st_size);
  if (offset > length || size > length - offset) no_memory("it is shorter than what is to be there");
  const int seals = fcntl(descriptor, F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK)) no_memory("it is no memory that can't shrink");
}

}  // namespace

Window::Window(int descriptor, uint64_t offset, uint64_t size, uint64_t chunk) : chunk_(chunk) {
  if (chunk == 0 || chunk > most_chunk || size > most_data || size / chunk >= UINT32_MAX)
    no_memory("it is too much for a shard, or for a chunk");
  refuse_what_may_shrink(descriptor, offset, size);
  if (size == 0) return;
  const uint64_t before = offset % static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  is_writable_ = (fcntl(descriptor, F_GETFL) & O_ACCMODE) == O_RDWR;
  const int rights = PROT_READ | (is_writable_ ? PROT_WRITE : 0);
  const size_t mapped = before + size;
  void* const begin = mmap(nullptr, mapped, rights, MAP_SHARED | MAP_POPULATE, descriptor,
                           static_cast<off_t>(offset - before));
  if (begin == MAP_FAILED) no_memory(std::strerror(errno));
  mapping_ = {begin, [mapped](void* mapping) { munmap(mapping, mapped); }};
  bytes_ = {static_cast<std::byte*>(begin) + before, size};
}

Window Window::part(uint64_t first, uint64_t count) const {
  if (first > chunks() || count > chunks() - first) no_memory("it has not so many chunks");
  Window found = *this;
  const uint64_t begin = std::min<uint64_t>(first * chunk_, bytes_.size());
  found.bytes_ = bytes_.subspan(begin, std::min<uint64_t>(count * chunk_, bytes_.size() - begin));
  return found;
}

void Window::check(size_t digests) const {
  if (chunks() != digests) no_memory("it has another number of chunks than of checksums");
}

std::vector<Digest> digests_of(const Window& window) {
  std::vector<Digest> digests(window.chunks());
  for (uint64_t number = 0; number < digests.size(); ++number)
    digests[number] = digest_of(window.chunk(number));
  return digests;
}

void verify(const Window& window, std::span<const Digest> digests) {
  window.check(digests.size());
  for (uint64_t number = 0; number < digests.size(); ++number) {
    if (digest_of(window.chunk(number)) != digests[number])
      throw ChunkFailure(Reason::damaged, "its checksum is another", number);
  }
}

void copy(const Window& window, std::span<const Digest> digests, std::span<std::byte> to) {
  window.check(digests.size());
  if (to.size() != window.bytes().size()) no_memory("what it is to be copied to has another size");
  Digester digester;
  for (uint64_t number = 0; number < digests.size(); ++number) {
    const std::span<std::byte> chunk = window.chunk(number);
    for (size_t begin = 0; begin < chunk.size(); begin += piece_size) {
      const auto piece = chunk.subspan(begin, std::min(piece_size, chunk.size() - begin));
      const auto target = to.subspan(number * window.chunk_size() + begin, piece.size());
      std::memcpy(target.data(), piece.data(), piece.size());
      digester.add(target);
    }
    if (digester.finish() != digests[number])
      throw ChunkFailure(Reason::damaged, "its checksum is another", number);
  }
}

}  // namespace jitckpt::memory_tier
