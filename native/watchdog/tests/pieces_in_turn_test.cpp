#include "watchdog/pieces_in_turn.h"

#include <gtest/gtest.h>

#include <string>

namespace jitckpt::watchdog {
namespace {

class PiecesInTurnTest : public testing::Test {
 protected:
  static std::vector<CopyPiece> pieces(std::vector<uint64_t> points) {
    std::vector<CopyPiece> made;
    for (const uint64_t point : points) made.push_back({point, nullptr, nullptr, made.size()});
    return made;
  }

  PiecesInTurn turn;
  std::string seen;  // a letter for each call: | for a point, the piece's number, . for the end
  size_t refused = 99;
  PiecesInTurn::Device device{[this] { seen += '|'; },
                              [this](const CopyPiece& piece) {
                                if (piece.bytes == refused) return false;
                                seen += std::to_string(piece.bytes);
                                return true;
                              },
                              [this] {
                                seen += '.';
                                return true;
                              }};
};

TEST_F(PiecesInTurnTest, each_comes_at_its_point_and_all_once) {
  EXPECT_FALSE(turn.counts());
  turn.minibatch_begins();
  EXPECT_TRUE(turn.begin(pieces({0, 2, 2, 3}), device));
  EXPECT_TRUE(turn.counts());
  EXPECT_EQ(seen, "0");
  turn.pass_point(device);
  EXPECT_EQ(seen, "0");
  turn.pass_point(device);
  EXPECT_EQ(seen, "0|12");
  turn.pass_point(device);
  turn.pass_point(device);
  EXPECT_EQ(seen, "0|12|3.");
  EXPECT_TRUE(turn.is_open());
  EXPECT_EQ(turn.put_rest(device), 0);
  EXPECT_FALSE(turn.is_open());
  EXPECT_EQ(seen, "0|12|3.");
}

TEST_F(PiecesInTurnTest, what_is_left_is_put_without_a_point) {
  turn.begin(pieces({1, 5, 7}), device);
  turn.pass_point(device);
  EXPECT_EQ(turn.put_rest(device), 2);
  EXPECT_EQ(seen, "|012.");
  EXPECT_EQ(turn.put_rest(device), 0);
  for (int point = 0; point < 9; ++point) turn.pass_point(device);
  EXPECT_EQ(seen, "|012.");
}

TEST_F(PiecesInTurnTest, points_that_are_over_are_awaited_by_nobody) {
  turn.count_from_now();
  turn.minibatch_begins();
  turn.pass_point(device);
  turn.pass_point(device);
  turn.begin(pieces({1, 2, 3}), device);
  EXPECT_EQ(seen, "01");
  turn.minibatch_begins();
  turn.pass_point(device);
  EXPECT_EQ(seen, "01") << "counted anew";
}

TEST_F(PiecesInTurnTest, others_take_the_place_of_what_is_still_to_come) {
  turn.begin(pieces({1, 4}), device);
  turn.begin(pieces({2}), device);
  turn.pass_point(device);
  EXPECT_EQ(seen, "");
  turn.drop();
  EXPECT_FALSE(turn.is_open());
  turn.pass_point(device);
  EXPECT_EQ(turn.put_rest(device), 0);
  EXPECT_EQ(seen, "");
}

TEST_F(PiecesInTurnTest, none_at_all_is_over_at_once) {
  EXPECT_TRUE(turn.begin({}, device));
  EXPECT_EQ(seen, ".");
}

TEST_F(PiecesInTurnTest, one_that_is_refused_ends_them_and_is_told) {
  refused = 1;
  EXPECT_TRUE(turn.begin(pieces({0, 1, 2}), device));
  turn.pass_point(device);
  turn.pass_point(device);
  EXPECT_EQ(seen, "0|");
  EXPECT_EQ(turn.put_rest(device), -1);
  EXPECT_FALSE(turn.begin(pieces({0, 0}), device));
}

}  // namespace
}  // namespace jitckpt::watchdog
