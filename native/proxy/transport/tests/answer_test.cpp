#include "proxy/transport/answer.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "proxy/transport/log_reader.h"
#include "proxy/transport/log_writer.h"
#include "proxy/transport/shared_file.h"

namespace jitckpt::proxy {
namespace {

constexpr Geometry geometry{4096, 2};

struct Answers : testing::Test {
  SharedFile file{"answer-test", geometry.bytes()};
  Mapping mapping{file};
  Log log{mapping.begin(), geometry};
  Answers() { log.control().start = {0, 0, 1}; }
};

TEST_F(Answers, EveryThreadHasASlotOfItsOwn) {
  for (std::size_t index = 0; index < slot_count; ++index) EXPECT_EQ(take_slot(log), index);
  EXPECT_EQ(take_slot(log), slot_count);
  log.slot(7).taken = 0;
  EXPECT_EQ(take_slot(log), 7u);
}

TEST_F(Answers, ComeThroughTheLogAndBack) {
  LogWriter writer(log, [] { return true; });
  constexpr uint32_t calls = 2000;
  std::thread server([&] {
    LogReader reader(log, std::chrono::microseconds(5), [] { return true; });
    for (uint32_t call = 1; call <= calls; ++call) {
      const Record record = reader.next().value();
      log.slot(record.slot).content[0] = record.content[0];
      reader.done();
      answer(log.slot(record.slot), record.answer, static_cast<int32_t>(call), 1, "number");
    }
  });
  Slot& slot = log.slot(take_slot(log));
  for (uint32_t call = 1; call <= calls; ++call) {
    const auto place = writer.reserve(1);
    place.header->call = 1;
    place.header->slot = 0;
    place.header->answer = call;
    place.content()[0] = static_cast<std::byte>(call);
    writer.commit(place);
    ASSERT_TRUE(wait_for_answer(slot, call, std::chrono::microseconds(5), [] { return true; }));
    ASSERT_EQ(slot.result, static_cast<int32_t>(call));
    ASSERT_EQ(slot.content[0], static_cast<std::byte>(call));
    ASSERT_STREQ(slot.text, "number");
  }
  server.join();
}

// Between two servers: an answer that nobody has taken is void, one that was taken stays.
TEST_F(Answers, OfAnOldServerAreVoid) {
  Slot& slot = log.slot(3);
  for (int servers = 0; servers < 3; ++servers) {
    const uint32_t number = begin_question(slot);
    answer(slot, number, 0, 0, "");
    void_answers(log);
    EXPECT_FALSE(end_question(slot));
    EXPECT_FALSE(wait_for_answer(slot, number, std::chrono::microseconds(0), [] { return false; }));
    answer(slot, number, 0, 0, "");
    EXPECT_TRUE(end_question(slot));
    void_answers(log);
    EXPECT_EQ(slot.answered, number);
    EXPECT_EQ(slot.waits, Waits::no);
  }
}

TEST_F(Answers, NobodyWaitsForADeadServer) {
  EXPECT_FALSE(wait_for_answer(log.slot(0), 1, std::chrono::microseconds(0), [] { return false; }));
}

TEST_F(Answers, ALongTextIsCut) {
  answer(log.slot(0), 1, 0, 0, std::string(5000, 'x'));
  EXPECT_EQ(std::string(log.slot(0).text).size(), sizeof log.slot(0).text - 1);
}

}  // namespace
}  // namespace jitckpt::proxy
