// Which pages have stood somewhere before, as their checksums say.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "memory_tier/digests.h"

namespace jitckpt::pages {

using memory_tier::Digest;

// Pages begin up to end. same_as: the place of the first of the same that have stood in a row before.
struct Run {
  static constexpr uint64_t none = ~uint64_t{0};  // place: they are new

  size_t begin;
  size_t end;
  uint64_t same_as;

  bool operator==(const Run&) const = default;
};

class PageIndex {
 public:
  // most: pages that are known. least: in a row, for which it is worth to say where they have stood.
  PageIndex(size_t most, size_t least) : most_(most), least_(least) {}

  // Part pages that stand in a row from the place `own` on, which is less than Run::none; from now on they
  // are known, too.
  std::vector<Run> runs(std::span<const Digest> pages, uint64_t own);

 private:
  struct Known {
    Digest digest;
    uint64_t place = Run::none;  // nothing is known here
  };

  // Where such a page has stood first; `own`: nowhere, so it is there.
  uint64_t first_place(const Digest& page, uint64_t own);
  Known& slot(const Digest& page);
  void grow();

  const size_t most_;
  const size_t least_;
  size_t count_ = 0;
  std::vector<Known> known_;  // twice as many as are known at least: a power of two
};

}  // namespace jitckpt::pages
