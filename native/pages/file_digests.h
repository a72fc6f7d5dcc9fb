// The checksums of the pages of a file, and of what they make up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "memory_tier/digests.h"

namespace jitckpt::pages {

using memory_tier::Digest;

constexpr size_t page_size = 4096;

// Of each page of what lies in one piece; the last one may be shorter.
std::vector<Digest> digests_of(std::span<const std::byte> data);

// Of each page of such a piece of a file. Throws std::system_error where it can't be read, or ends before.
std::vector<Digest> digests_of(int file, uint64_t at, size_t size);

// Of the bytes of all these pages: so who has read each page once need not read it again.
Digest whole(std::span<const Digest> pages);

}  // namespace jitckpt::pages
