// What the program's thread hears at its place of a validation, whatever comes late.
#include "proxy/client/validation.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

using namespace jitckpt::proxy::client;
using Heard = Validation::Heard;

namespace {

// A thread that says something at a place, and waits there.
class Rank {
 public:
  Rank(Validation& validation, uint64_t place, uint64_t says = 0)
      : thread_([this, &validation, place, says] {
          heard_ = validation.say({place, says, "", "", ""});
          has_heard_ = true;
        }) {}
  ~Rank() { thread_.join(); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  bool has_heard() const { return has_heard_; }
  Heard heard() {
    while (!has_heard_) std::this_thread::yield();
    return heard_;
  }

 private:
  std::atomic<Heard> heard_{Heard::over};
  std::atomic<bool> has_heard_{false};
  std::thread thread_;
};

void wait_for_word(Validation& validation, uint64_t place) {
  for (;;) {
    if (const auto said = validation.take()) {
      EXPECT_EQ(said->place, place);
      return;
    }
    std::this_thread::yield();
  }
}

TEST(Validation, AnAnswerOfAnotherPlaceIsNoneForThisOne) {
  Validation validation;
  validation.begin([] {});
  Rank rank(validation, 26);
  wait_for_word(validation, 26);
  validation.hear_of(22, Heard::left_out);
  EXPECT_FALSE(rank.has_heard());
  validation.hear_of(26, Heard::stays);
  EXPECT_EQ(rank.heard(), Heard::stays);
}

TEST(Validation, ARankRestsUntilItHears) {
  Validation validation;
  validation.begin([] {});
  EXPECT_FALSE(validation.rests());
  {
    Rank rank(validation, 26, says_rests);
    wait_for_word(validation, 26);
    EXPECT_TRUE(validation.rests());
    validation.hear(Heard::again);
  }
  EXPECT_FALSE(validation.rests());
  Rank rank(validation, 27);
  wait_for_word(validation, 27);
  EXPECT_FALSE(validation.rests());
  validation.hear(Heard::again);
}

TEST(Validation, AWordOfBeforeARecoveryIsNotSaidBehindIt) {
  Validation validation;
  std::atomic<bool> news{false};
  validation.begin([&news] { news = true; });
  Rank rank(validation, 10);
  while (!news) std::this_thread::yield();
  validation.hear(Heard::again);
  EXPECT_EQ(rank.heard(), Heard::again);
  EXPECT_FALSE(validation.take());
}

}  // namespace
