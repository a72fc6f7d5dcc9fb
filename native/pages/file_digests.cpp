#include "pages/file_digests.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace jitckpt::pages {

namespace {

constexpr size_t at_once = 64 * page_size;  // in the processor's cache, when it is looked at

void add(std::vector<Digest>& digests, std::span<const std::byte> data) {
  for (size_t begin = 0; begin < data.size(); begin += page_size)
    digests.push_back(memory_tier::digest_of(data.subspan(begin, std::min(page_size, data.size() - begin))));
}

void read_whole(int file, uint64_t at, std::span<std::byte> into) {
  while (!into.empty()) {
    const ssize_t size = ::pread(file, into.data(), into.size(), static_cast<off_t>(at));
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) throw std::system_error(size < 0 ? errno : ENODATA, std::generic_category());
    at += static_cast<size_t>(size);
    into = into.subspan(static_cast<size_t>(size));
  }
}

}  // namespace

std::vector<Digest> digests_of(std::span<const std::byte> data) {
  std::vector<Digest> digests;
  digests.reserve(data.size() / page_size + 1);
  add(digests, data);
  return digests;
}

std::vector<Digest> digests_of(int file, uint64_t at, size_t size) {
  std::vector<Digest> digests;
  digests.reserve(size / page_size + 1);
  std::vector<std::byte> buffer(std::min(size, at_once));
  for (size_t begin = 0; begin < size; begin += at_once) {
    const auto piece = std::span(buffer).first(std::min(at_once, size - begin));
    read_whole(file, at + begin, piece);
    add(digests, piece);
  }
  return digests;
}

Digest whole(std::span<const Digest> pages) { return memory_tier::digest_of(std::as_bytes(pages)); }

}  // namespace jitckpt::pages
