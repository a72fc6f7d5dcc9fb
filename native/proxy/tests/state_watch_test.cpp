// Which calls may write to the state, by what their records say.
#include "proxy/client/state_watch.h"

#include <gtest/gtest.h>

#include <cstring>

namespace {

using jitckpt::proxy::client::Allocation;
using jitckpt::proxy::client::Extent;
using jitckpt::proxy::client::StateWatch;

constexpr uint64_t device = 0x302'0000'0000;

struct Call {
  uint64_t kernel;
  std::vector<uint64_t> words;
};

struct Watched {
  Watched() {
    watch.watch_storages(
        std::vector<jitckpt_proxy_place>{{device + 0x1000, 0x400}, {device + 0x2000, 0x200}});
    const std::vector<jitckpt_proxy_place> places{{device + 0x1100, 0x200}, {device + 0x2000, 0x200}};
    watch.watch(places, {{device, 0x10000, 0}});
  }
  std::optional<StateWatch::Doubt> doubts(const Call& call) {
    return watch.doubts(std::as_bytes(std::span(&call.kernel, 1)), std::as_bytes(std::span(call.words)));
  }
  StateWatch watch;
};

TEST(StateWatch, DoubtsWhateverIsGivenAnAddressWithinAStorageOfTheState) {
  Watched one;
  EXPECT_FALSE(one.doubts({1, {device, device + 0xfff, device + 0x1400, device + 0x2200, 7}}));
  for (const uint64_t inside : {0x1000, 0x1100, 0x13ff, 0x2000, 0x21ff}) {
    const auto doubt = one.doubts({1, {7, device + inside}});
    ASSERT_TRUE(doubt) << inside;
    const Extent storage =
        inside < 0x2000 ? Extent{device + 0x1000, device + 0x1400} : Extent{device + 0x2000, device + 0x2200};
    EXPECT_EQ(doubt->extents, std::vector{storage});
  }
}

TEST(StateWatch, TrustsACallThatIsMadeInTheSameWayWhateverTheAddresses) {
  Watched one;
  const auto doubt = one.doubts({3, {device + 0x1000, device + 0x5000, 64, 0x7f12'3456'7890}});
  ASSERT_TRUE(doubt);
  one.watch.trust(doubt->way);
  EXPECT_FALSE(one.doubts({3, {device + 0x2000, device + 0x6000, 64, 0x55aa'0000'0010}}));
}

TEST(StateWatch, TakesEachOtherNumberPlaceOrKernelForAnotherWay) {
  Watched one;
  const Call known{3, {device + 0x1000, device + 0x5000, 64}};
  one.watch.trust(one.doubts(known)->way);
  EXPECT_TRUE(one.doubts({4, known.words}));
  EXPECT_TRUE(one.doubts({3, {device + 0x1000, device + 0x5000, 65}}));
  EXPECT_TRUE(one.doubts({3, {device + 0x5000, device + 0x1000, 64}}));
  EXPECT_TRUE(one.doubts({3, {device + 0x1000, device + 0x2000, 64}}));
  EXPECT_TRUE(one.doubts({3, {device + 0x1000, 0x5000, 64}}));
  EXPECT_FALSE(one.doubts(known));
}

TEST(StateWatch, SeesAnAddressInWordsThatAreNotWhole) {
  Watched one;
  const std::vector<uint64_t> words{device + 0x1000, 5};
  const auto bytes = std::as_bytes(std::span(words));
  const auto doubt = one.watch.doubts({}, bytes.first(13));
  ASSERT_TRUE(doubt);
  one.watch.trust(doubt->way);
  EXPECT_FALSE(one.watch.doubts({}, bytes.first(13)));
}

TEST(StateWatch, WatchesNothingOfWhichItWasToldNothing) {
  StateWatch none;
  const Call call{1, {0, device}};
  EXPECT_FALSE(none.doubts({}, std::as_bytes(std::span(call.words))));
}

TEST(StateWatch, ForgetsStoragesOfBefore) {
  Watched one;
  const std::vector<jitckpt_proxy_place> moved{{device + 0x4000, 0x100}};
  one.watch.watch_storages(moved);
  one.watch.watch(moved, {{device, 0x10000, 0}});
  EXPECT_FALSE(one.doubts({1, {device + 0x1000}}));
  EXPECT_TRUE(one.doubts({1, {device + 0x4080}}));
}

}  // namespace
