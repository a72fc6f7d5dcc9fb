#include "pages/page_index.h"

#include <cstring>
#include <optional>
#include <utility>

namespace jitckpt::pages {

namespace {

constexpr size_t fewest_slots = 1 << 12;

}  // namespace

std::vector<Run> PageIndex::runs(std::span<const Digest> pages, uint64_t own) {
  std::vector<Run> runs;
  size_t begun = 0;        // of what is new, or too little in a row
  std::optional<Run> row;  // of pages that have stood in a row
  const auto end_row = [&](size_t end) {
    if (row && end - row->begin >= least_) {
      if (begun < row->begin) runs.push_back({begun, row->begin, Run::none});
      runs.push_back({row->begin, end, row->same_as});
      begun = end;
    }
    row.reset();
  };
  for (size_t page = 0; page < pages.size(); ++page) {
    const uint64_t place = first_place(pages[page], own + page);
    if (row && place != row->same_as + (page - row->begin)) end_row(page);
    if (place == own + page)
      end_row(page);
    else if (!row)
      row = {page, page, place};
  }
  end_row(pages.size());
  if (begun < pages.size()) runs.push_back({begun, pages.size(), Run::none});
  return runs;
}

uint64_t PageIndex::first_place(const Digest& page, uint64_t own) {
  if (known_.size() < 2 * (count_ + 1)) grow();
  Known& known = slot(page);
  if (known.place != Run::none) return known.place;
  if (count_ < most_) {
    known = {page, own};
    ++count_;
  }
  return own;
}

PageIndex::Known& PageIndex::slot(const Digest& page) {
  size_t number;
  std::memcpy(&number, page.data(), sizeof number);
  for (const size_t mask = known_.size() - 1;; ++number) {
    Known& known = known_[number & mask];
    if (known.place == Run::none || known.digest == page) return known;
  }
}

void PageIndex::grow() {
  std::vector<Known> before(known_.empty() ? fewest_slots : 2 * known_.size());
  std::swap(before, known_);
  for (const Known& known : before)
    if (known.place != Run::none) slot(known.digest) = known;
}

}  // namespace jitckpt::pages
