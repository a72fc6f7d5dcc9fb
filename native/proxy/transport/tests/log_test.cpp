#include <gtest/gtest.h>
#include <sys/stat.h>

#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <random>
#include <string_view>
#include <thread>
#include <vector>

#include "proxy/transport/log_reader.h"
#include "proxy/transport/log_writer.h"
#include "proxy/transport/shared_file.h"

namespace jitckpt::proxy {
namespace {

constexpr std::chrono::microseconds no_spin{0};
bool never() { return false; }

// A log as client and server share it.
struct SharedLog {
  explicit SharedLog(Geometry geometry = {4096, 4})
      : file("log-test", geometry.bytes()), mapping(file), log(mapping.begin(), geometry) {
    log.control().magic = log_magic;
    log.control().segment_bytes = geometry.segment_bytes;
    log.control().segment_count = geometry.segment_count;
    log.control().start = {0, 0, 1};
  }
  SharedFile file;
  Mapping mapping;
  Log log;
};

// The content of record number n: its length and its bytes both follow from n.
std::vector<unsigned char> content_of(uint64_t number, std::size_t longest) {
  std::mt19937_64 random(number);
  std::vector<unsigned char> bytes(random() % longest);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

void append(LogWriter& writer, uint16_t call, const std::vector<unsigned char>& content, uint16_t slot = 0,
            uint32_t answer = 0) {
  const auto place = writer.reserve(content.size());
  ASSERT_NE(place.header, nullptr);
  place.header->call = call;
  place.header->slot = slot;
  place.header->device = 1;
  place.header->answer = answer;
  if (!content.empty()) std::memcpy(place.content(), content.data(), content.size());
  writer.commit(place);
}

TEST(Log, GivesBackWhatWasAppended) {
  SharedLog shared;
  LogWriter writer(shared.log, never);
  LogReader reader(shared.log, no_spin, never);
  const std::size_t longest = writer.longest_content();
  for (uint64_t number = 0; number < 500; ++number) {
    const auto content = content_of(number, longest + 1);
    append(writer, static_cast<uint16_t>(number), content, 3);
    const Record record = reader.next().value();
    EXPECT_EQ(record.call, number);
    EXPECT_EQ(record.slot, 3);
    EXPECT_EQ(record.device, 1);
    ASSERT_GE(record.bytes, content.size());
    ASSERT_LT(record.bytes, content.size() + record_alignment);
    EXPECT_TRUE(content.empty() || std::memcmp(record.content, content.data(), content.size()) == 0);
    reader.done();
  }
}

TEST(Log, KeepsTheOrderOfEachThread) {
  SharedLog shared;
  LogWriter writer(shared.log, [] { return true; });
  constexpr int threads = 4, calls = 2000;
  std::vector<std::thread> writers;
  for (int thread = 0; thread < threads; ++thread) {
    writers.emplace_back([&, thread] {
      for (int call = 0; call < calls; ++call) {
        const std::vector<unsigned char> content(static_cast<std::size_t>(call % 200),
                                                 static_cast<unsigned char>(call));
        append(writer, static_cast<uint16_t>(call), content, static_cast<uint16_t>(thread));
      }
    });
  }
  std::vector<int> next(threads, 0);
  LogReader reader(shared.log, std::chrono::microseconds(20), [] { return true; });
  for (int record = 0; record < threads * calls; ++record) {
    const Record read = reader.next().value();
    ASSERT_EQ(read.call, next[read.slot]);
    for (int byte = 0; byte < read.call % 200; ++byte)
      ASSERT_EQ(static_cast<unsigned char>(read.content[byte]), static_cast<unsigned char>(read.call));
    ++next[read.slot];
    reader.done();
  }
  for (auto& thread : writers) thread.join();
}

TEST(Log, WakesTheReaderForTheRecordThatItWantsOrOneWithAnAnswer) {
  SharedLog shared;
  LogWriter writer(shared.log, never);
  std::atomic<uint32_t>& sleeps = shared.log.control().reader_woken_by;
  sleeps = woken_by(3);
  append(writer, 1, {});
  append(writer, 1, {});
  EXPECT_EQ(sleeps, woken_by(3));
  append(writer, 1, {});
  EXPECT_EQ(sleeps, awake);
  sleeps = woken_by(20);
  append(writer, 1, {}, 0, 1);
  EXPECT_EQ(sleeps, awake);
}

TEST(Log, WakesTheReaderWhereHalfANumberBeginsAgain) {
  constexpr uint64_t turn = uint64_t{1} << 32;
  for (const uint64_t number : {turn - 1, turn, turn + 1}) {
    EXPECT_NE(woken_by(number), awake);
    EXPECT_TRUE(wakes(number, woken_by(number)));
    EXPECT_TRUE(wakes(number + 15, woken_by(number)));
    EXPECT_FALSE(wakes(number - 2, woken_by(number)));
  }
}

TEST(Log, ReadsARecordThatNobodyIsWokenFor) {
  for (const auto spin_time : {no_spin, std::chrono::microseconds(1)}) {
    SharedLog shared;
    LogWriter writer(shared.log, never);
    std::thread reading([&] {
      LogReader reader(shared.log, spin_time, [] { return true; });
      for (uint16_t call = 0; call < 3; ++call) {
        EXPECT_EQ(reader.next().value().call, call);
        reader.done();
      }
    });
    for (uint16_t call = 0; call < 3; ++call) {
      while (shared.log.control().reader_woken_by == awake) std::this_thread::yield();
      append(writer, call, {});
      while (shared.log.control().read != call + 1u) std::this_thread::yield();
    }
    reading.join();
  }
}

TEST(Log, AProgramThatPausesShortlyDoesNotWakeTheReader) {
  using namespace std::chrono_literals;
  for (const bool spins : {false, true}) {
    std::chrono::microseconds pause{0};
    int slept = 0;
    for (; next_sleep(spins, slept).records > 1; ++slept) {
      EXPECT_EQ(next_sleep(spins, slept).records, 1000);
      pause += next_sleep(spins, slept).longest;
    }
    EXPECT_GE(pause, 1ms);
    EXPECT_LE(pause, 10ms);
    EXPECT_EQ(next_sleep(spins, slept + 1'000'000).records, 1);
  }
  // Beside a free core the device does not wait long for what is called.
  EXPECT_LE(next_sleep(true, 0).longest, 50us);
}

TEST(Log, TheReaderNapsBeforeTheNextRecordWakesIt) {
  for (const auto spin_time : {no_spin, std::chrono::microseconds(1)}) {
    SharedLog shared;
    LogWriter writer(shared.log, never);
    std::atomic<bool> goes_on = true;
    std::thread reading([&] {
      LogReader reader(shared.log, spin_time, [&] { return goes_on.load(); });
      while (reader.next()) reader.done();
    });
    // This thread may miss all the naps behind one record; there are others.
    uint64_t next = 1;
    for (bool has_napped = false; !has_napped;) {
      const uint32_t by = shared.log.control().reader_woken_by;
      has_napped = by == woken_by(next + 999);
      if (by == woken_by(next)) {
        append(writer, 1, {});
        while (shared.log.control().read != next) std::this_thread::yield();
        ++next;
      }
    }
    while (shared.log.control().reader_woken_by != woken_by(next)) std::this_thread::yield();
    goes_on = false;
    reading.join();
  }
}

// Memory that is used again holds what programs have copied and passed, which may be any number.
TEST(Log, WhatRecycledMemoryHoldsIsTakenForNoRecord) {
  constexpr uint64_t awaited = 40;
  SharedLog shared({4096, 2});
  LogWriter writer(shared.log, never);
  LogReader reader(shared.log, no_spin, never);
  std::vector<unsigned char> content(writer.longest_content());
  for (std::size_t at = 0; at + sizeof awaited <= content.size(); at += sizeof awaited)
    std::memcpy(&content[at], &awaited, sizeof awaited);
  uint64_t number = 0;
  while (number < awaited - 1) {
    append(writer, 1, number < 4 ? content : std::vector<unsigned char>());
    number = reader.next().value().sequence;
    reader.done();
  }
  EXPECT_FALSE(reader.next().has_value());
  append(writer, 7, {});
  EXPECT_EQ(reader.next().value().call, 7);
}

TEST(Log, GivesUpWhereThereIsNoRoomAndNoReader) {
  SharedLog shared;
  LogWriter writer(shared.log, never);
  int appended = 0;
  while (const auto* const header = writer.reserve(1000).header) {
    ASSERT_NE(header, nullptr);
    ASSERT_LT(++appended, 100);
  }
  EXPECT_EQ(appended, 3 * 4);  // of 1040 bytes in 4096
  EXPECT_EQ(writer.reserve(writer.longest_content() + 1).header, nullptr);
}

TEST(Log, NobodyGetsRoomWhileItIsStopped) {
  SharedLog shared;
  std::atomic<bool> waits{false};
  LogWriter writer(shared.log, [&waits] { return waits = true; });
  append(writer, 1, {});
  writer.stop();
  std::thread thread([&writer] { append(writer, 2, {}); });
  while (!waits) std::this_thread::yield();
  EXPECT_EQ(writer.newest(), 1u);
  writer.go_on();
  thread.join();
  EXPECT_EQ(writer.newest(), 2u);
}

TEST(Log, NeedsNoMoreMemoryThanWhatIsUnread) {
  SharedLog shared({4096, 1000});
  LogWriter writer(shared.log, never);
  LogReader reader(shared.log, no_spin, never);
  for (int record = 0; record < 10000; ++record) {
    append(writer, 1, std::vector<unsigned char>(1000));
    reader.next();
    reader.done();
  }
  const auto* const third = reinterpret_cast<const RecordHeader*>(shared.log.segment(2));
  EXPECT_EQ(third->sequence, 0u);
}

// So that what is written in each minibatch stays in the caches.
TEST(Log, MinibatchesLieWhereThoseShortlyBeforeHaveLain) {
  SharedLog shared({1 << 20, 16});
  LogWriter writer(shared.log, never);
  LogReader reader(shared.log, no_spin, never);
  std::deque<Position> kept;
  for (int minibatch = 0; minibatch < 200; ++minibatch) {
    writer.commit([&] {
      const auto place = writer.reserve(4, &kept.emplace_back());
      place.header->call = 1;
      place.header->slot = 0;
      place.header->answer = 0;
      return place;
    }());
    for (int record = 0; record < 20; ++record) append(writer, 2, std::vector<unsigned char>(5000));
    for (int record = 0; record < 21; ++record) {
      ASSERT_EQ(reader.next().value().call, record == 0 ? 1 : 2);
      reader.done();
    }
    if (kept.size() > 2) kept.pop_front();
    writer.forget_before(kept.front());
    for (const Position& one : kept) {
      shared.log.control().start = one;
      EXPECT_EQ(LogReader(shared.log, no_spin, never).next().value().call, 1);
    }
  }
  EXPECT_GT(writer.bytes(), 3u * 100'000);
  EXPECT_LT(writer.bytes(), 5u * 200'000);
}

std::size_t resident_bytes(const SharedFile& file) {
  struct stat status{};
  EXPECT_EQ(fstat(file.descriptor(), &status), 0);
  return static_cast<std::size_t>(status.st_blocks) * 512;
}

TEST(Log, GivesMemoryBackThatAMinibatchHasOutgrown) {
  SharedLog shared({1 << 20, 16});
  int outgrown = 0;
  LogWriter writer(shared.log, never, [&] { ++outgrown; });
  LogReader reader(shared.log, no_spin, never);
  writer.keep();
  for (int record = 0; outgrown == 0 && record < 10'000; ++record) {
    append(writer, 2, std::vector<unsigned char>(50'000, 'x'));
    EXPECT_EQ(reader.next().value().content[0], std::byte{'x'});
    reader.done();
  }
  EXPECT_EQ(outgrown, 1);
  EXPECT_FALSE(writer.keeps());
  EXPECT_LT(resident_bytes(shared.file), 3u << 20);
  EXPECT_LT(writer.bytes(), 3u << 20);
  EXPECT_GT(writer.most_bytes(), 12u << 20);
  // It is used again.
  writer.keep();
  for (int record = 0; record < 200; ++record) {
    append(writer, 2, content_of(static_cast<uint64_t>(record), 50'000));
    EXPECT_EQ(reader.next().value().call, 2);
    reader.done();
  }
  EXPECT_EQ(outgrown, 1);
  EXPECT_GT(resident_bytes(shared.file), 3u << 20);
}

// As an evaluation now and then is, which fits.
TEST(Log, GivesMemoryBackThatSomeMinibatchesHaveNotUsed) {
  SharedLog shared({1 << 20, 16});
  LogWriter writer(shared.log, never);
  LogReader reader(shared.log, no_spin, never);
  for (int minibatch = 0; minibatch < 40; ++minibatch) {
    writer.forget_before(writer.keep());
    for (int record = 0; record < (minibatch == 5 ? 200 : 10); ++record) {
      append(writer, 2, std::vector<unsigned char>(50'000, 'x'));
      reader.next();
      reader.done();
    }
    if (minibatch == 5) {
      EXPECT_GT(resident_bytes(shared.file), 9u << 20);
    }
  }
  EXPECT_LT(resident_bytes(shared.file), 4u << 20);
}

// A second reader, as a new server is.
TEST(Log, WhatIsKeptCanBeReadAgainAfterRecordsApart) {
  SharedLog shared({4096, 24});
  LogWriter writer(shared.log, never);
  uint16_t call = 0;
  const auto append_some = [&](int count) {
    for (int record = 0; record < count; ++record) append(writer, call++, std::vector<unsigned char>(700));
  };
  LogReader first(shared.log, no_spin, never);
  const auto read_all = [](LogReader& reader) {
    std::vector<int> calls;
    while (const auto record = reader.next()) {
      calls.push_back(record->call);
      reader.done();
    }
    return calls;
  };
  for (int minibatch = 0; minibatch < 20; ++minibatch) {
    append_some(13);
    read_all(first);
    const Position older = writer.keep();
    writer.forget_before(older);
    append_some(4);
    read_all(first);
    const Position newer = writer.keep();
    const bool from_older = minibatch % 2 == 1;
    append_some(25);
    read_all(first);
    append_some(3);  // which the first one never sees

    std::vector<LogWriter::Apart> apart;
    for (int record = 0; record < 9; ++record)
      apart.push_back({static_cast<uint16_t>(1000 + record), 1, std::vector<std::byte>(900)});
    ASSERT_TRUE(writer.write_apart(apart, newer));  // for a server that dies before it has read anything
    const auto start = writer.write_apart(apart, from_older ? older : newer);
    ASSERT_TRUE(start);
    shared.log.control().start = *start;
    LogReader second(shared.log, no_spin, never);
    std::vector<int> expected;
    for (int record = 0; record < 9; ++record) expected.push_back(1000 + record);
    for (int record = call - (from_older ? 32 : 28); record < call; ++record) expected.push_back(record);
    ASSERT_EQ(read_all(second), expected);
    append_some(5);
    EXPECT_EQ(read_all(second), (std::vector<int>{call - 5, call - 4, call - 3, call - 2, call - 1}));
    EXPECT_TRUE(writer.keeps());
    shared.log.control().start = {};
    ASSERT_EQ(read_all(first).size(), 8u);
  }
}

TEST(Log, WhatIsKeptLongestIsForgottenWhereThereIsNoMoreRoom) {
  SharedLog shared;
  int outgrown = 0;
  LogWriter writer(shared.log, never, [&] { ++outgrown; });
  LogReader reader(shared.log, no_spin, never);
  const auto append_and_read = [&] {
    append(writer, 1, std::vector<unsigned char>(1000));
    ASSERT_TRUE(reader.next());
    reader.done();
  };
  const Position older = writer.keep();
  for (int record = 0; record < 5; ++record) append_and_read();
  const Position newer = writer.keep();
  for (int record = 0; record < 5; ++record) append_and_read();
  EXPECT_FALSE(writer.is_kept(older.sequence));
  EXPECT_TRUE(writer.write_apart({}, newer));
  EXPECT_EQ(outgrown, 0);
  for (int record = 0; record < 5; ++record) append_and_read();
  EXPECT_FALSE(writer.keeps());
  EXPECT_EQ(outgrown, 1);
}

TEST(Log, KeepingEndsWhereThereIsNoMoreRoom) {
  SharedLog shared;
  LogWriter writer(shared.log, never);
  LogReader reader(shared.log, no_spin, never);
  writer.keep();
  for (int record = 0; record < 100; ++record) {
    append(writer, 1, std::vector<unsigned char>(1000));
    ASSERT_TRUE(reader.next());
    reader.done();
    EXPECT_EQ(writer.keeps(), record < 9) << record;  // of 1040 bytes in 4096; one segment of four stays free
  }
  EXPECT_FALSE(writer.write_apart({}, {0, 0, 1}));
}

// Whatever other threads append, a record belongs to what is before it or to what is kept.
TEST(Log, WhatIsKeptBeginsWithItsRecord) {
  SharedLog shared({1 << 20, 4});
  LogWriter writer(shared.log, never);
  std::thread other([&] {
    for (int record = 0; record < 2000; ++record) append(writer, 2, {});
  });
  for (int time = 0; time < 100; ++time) {
    Position kept{};
    const auto place = writer.reserve(4, &kept);
    EXPECT_EQ(kept.sequence, place.sequence);
    EXPECT_TRUE(writer.is_kept(kept.sequence));
    place.header->call = 1;
    place.header->slot = 0;
    place.header->answer = 0;
    writer.commit(place);
    writer.forget_before(kept);
    EXPECT_FALSE(writer.is_kept(place.sequence - 1));
    append(writer, 3, {});
    shared.log.control().start = kept;
    EXPECT_EQ(LogReader(shared.log, no_spin, never).next()->sequence, kept.sequence);
  }
  other.join();
}

// One of them would have to stay free, and the other is being filled.
TEST(Log, OfTwoSegmentsKeepsLittleButGoesOn) {
  SharedLog shared({4096, 2});
  int outgrown = 0;
  LogWriter writer(shared.log, never, [&] { ++outgrown; });
  LogReader reader(shared.log, no_spin, never);
  for (int record = 0; record < 100; ++record) {
    if (record % 8 == 0) writer.forget_before(writer.keep());
    append(writer, 1, std::vector<unsigned char>(1000));
    ASSERT_TRUE(reader.next());
    reader.done();
  }
  EXPECT_EQ(outgrown, 100 / 8 + 1);
}

TEST(Log, OnlyWhatIsKeptIsAmended) {
  SharedLog shared;
  LogWriter writer(shared.log, never);
  const auto reserve = [&] {
    const auto place = writer.reserve(4);
    place.header->call = 1;
    place.header->slot = 0;
    writer.commit(place);
    return place;
  };
  const auto before = reserve();
  writer.keep();
  const auto after = reserve();
  const std::array<std::byte, 2> news{std::byte{7}, std::byte{8}};
  writer.amend(before, news);
  writer.amend(after, news);
  EXPECT_EQ(before.content()[1], std::byte{0});
  EXPECT_EQ(after.content()[1], std::byte{8});
}

TEST(Log, NamesADamagedRecord) {
  const auto read_after = [](auto damage) {
    SharedLog shared;
    LogWriter writer(shared.log, never);
    append(writer, 7, {1, 2, 3});
    damage(*reinterpret_cast<RecordHeader*>(shared.log.segment(0)));
    LogReader(shared.log, no_spin, never).next();
  };
  EXPECT_NO_THROW(read_after([](RecordHeader&) {}));
  EXPECT_THROW(read_after([](RecordHeader& header) { header.bytes = 0; }), DamagedLog);
  EXPECT_THROW(read_after([](RecordHeader& header) { header.bytes = 8192; }), DamagedLog);
  EXPECT_THROW(read_after([](RecordHeader& header) { header.bytes += 1; }), DamagedLog);
  EXPECT_THROW(read_after([](RecordHeader& header) { header.slot = slot_count; }), DamagedLog);
  EXPECT_THROW(read_after([](RecordHeader& header) { header.call = continues; }), DamagedLog);
  try {
    read_after([](RecordHeader& header) { header.bytes = 8192; });
  } catch (const DamagedLog& error) {
    EXPECT_TRUE(std::string_view(error.what())
                    .starts_with("Record 1 of the log (segment 0, byte 0) has a length that can't be. "))
        << error.what();
  }
}

// Whatever the segments hold: the reader says what is wrong, or gives records that lie inside of them.
TEST(Log, NoDamageLeadsOutOfItsMemory) {
  std::mt19937_64 random(20261121);
  for (int trial = 0; trial < 300; ++trial) {
    SharedLog shared;
    {
      LogWriter writer(shared.log, never);
      for (int record = 0; record < 40; ++record)
        append(writer, static_cast<uint16_t>(record), std::vector<unsigned char>(random() % 300));
    }
    std::byte* const begin = shared.log.segment(0);
    const std::size_t bytes = 4 * 4096;
    for (int flip = 0; flip < 20; ++flip) {
      // Never a number: a record that is not there yet is waited for.
      const std::size_t place = random() % (bytes / record_alignment) * record_alignment + 8 + random() % 8;
      begin[place] = static_cast<std::byte>(random());
    }
    LogReader reader(shared.log, no_spin, never);
    try {
      for (int record = 0; record < 40; ++record) {
        const auto read = reader.next();
        if (!read) break;  // a length that is wrong but possible leads to where no record is
        ASSERT_GE(read->content, begin);
        ASSERT_LE(read->content + read->bytes, begin + bytes);
      }
    } catch (const DamagedLog&) {
    }
  }
}

// Two segments that each say that the other goes on: there is no record to be found, however long one looks.
TEST(Log, IsNotReadInCircles) {
  SharedLog shared;
  const auto lead = [&](std::size_t from, uint64_t number, const Position& to) {
    auto& header = *reinterpret_cast<RecordHeader*>(shared.log.segment(from));
    header.bytes = sizeof header + sizeof to;
    header.call = continues;
    std::memcpy(reinterpret_cast<std::byte*>(&header + 1), &to, sizeof to);
    header.sequence = number;
  };
  lead(0, 1, {1, 0, 2});
  lead(1, 2, {0, 0, 1});
  EXPECT_THROW(LogReader(shared.log, no_spin, never).next(), DamagedLog);
}

TEST(Log, RefusesMemoryThatIsNoLog) {
  SharedLog shared;
  const auto geometry = [&] { return read_geometry(shared.mapping.begin(), shared.mapping.bytes()); };
  EXPECT_EQ(geometry().segment_count, 4u);
  EXPECT_THROW(read_geometry(shared.mapping.begin(), 4096), DamagedLog);
  EXPECT_THROW(read_geometry(shared.mapping.begin(), shared.mapping.bytes() - 4096), DamagedLog);
  shared.log.control().segment_bytes = 0;
  EXPECT_THROW(geometry(), DamagedLog);
  shared.log.control().segment_bytes = 4096 + 8;
  EXPECT_THROW(geometry(), DamagedLog);
  shared.log.control().magic = 1;
  EXPECT_THROW(geometry(), DamagedLog);
}

}  // namespace
}  // namespace jitckpt::proxy
