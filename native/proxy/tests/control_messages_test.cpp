#include "proxy/client/control_messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace jitckpt::proxy::client::control {
namespace {

class Drawn {
 public:
  uint64_t number() { return random_() >> (random_() % 64); }
  std::string text() {
    std::string text(random_() % 40, ' ');
    for (char& letter : text) letter = static_cast<char>(random_());
    return text;
  }
  Key key() {
    Key key{};
    if (random_() % 4 != 0) std::ranges::generate(key, [this] { return static_cast<uint8_t>(random_()); });
    return key;
  }
  template <class Make>
  auto several(Make make) {
    std::vector<decltype(make())> all(random_() % 5);
    std::ranges::generate(all, make);
    return all;
  }
  NamedId named_id() {
    NamedId one{key(), {}};
    for (char& byte : one.id.internal) byte = static_cast<char>(random_());
    return one;
  }
  HostCopy host_copy() {
    const auto small = [this] { return static_cast<int32_t>(number()); };
    return {small(), small(), small(), number(), number(), number()};
  }
  FromWorker of_worker() {
    const auto small = [this] { return static_cast<int32_t>(number()); };
    const auto copy = [this] { return host_copy(); };
    const auto count = [&] { return Count{number(), small(), number(), number()}; };
    const auto member = [&] {
      return Membership{key(),
                        key(),
                        static_cast<uint32_t>(number()),
                        small(),
                        static_cast<uint32_t>(number()),
                        number(),
                        number(),
                        several(count)};
    };
    switch (random_() % 9) {
      case 0:
        return Hello{small(), small(), text()};
      case 1:
        return Alarm{number(), text()};
      case 2:
        return Stopped{number(), number(),        number(), number(), DeviceState{random_() % 4},
                       number(), number(),        number(), number(), number(),
                       text(),   several(member), number()};
      case 3:
        return Ids{several([this] { return named_id(); }), number(), number(), random_() % 2, several(copy)};
      case 4:
        return Standing{number(), number(), several(member)};
      case 5:
        return Held{};
      case 7:
        return Settled{random_() % 2, text()};
      case 6:
        return Validates{number(), number(), text(), text(), text()};
      default:
        return Done{number(), number(), number(), number(), number(), number()};
    }
  }
  FromAgent of_agent() {
    const auto creation = [this] { return Making{key(), static_cast<uint32_t>(number()), key()}; };
    switch (random_() % 9) {
      case 0:
        return Stop{};
      case 1:
        return Ask{};
      case 5:
        return Rest{};
      case 6:
        return Settle{};
      case 7:
        return GoOn{};
      case 2:
        return Restart{random_() % 2, number(), number()};
      case 3:
        return Replay{number(),
                      random_() % 2,
                      random_() % 2,
                      random_() % 2,
                      several([this] { return host_copy(); }),
                      several([this] { return named_id(); }),
                      several(creation)};
      case 4:
        return Validated{number(), random_() % 2};
      default:
        return GiveUp{text()};
    }
  }
  RecoveryNumber recovery() { return {number(), number()}; }
  std::mt19937_64& random() { return random_; }

 private:
  std::mt19937_64 random_{7};
};

TEST(ControlMessages, ComeBackAsTheyWere) {
  Drawn drawn;
  for (int round = 0; round < 2000; ++round) {
    const Numbered<FromWorker> said{drawn.recovery(), drawn.of_worker()};
    const auto bytes = encode(said);
    const auto heard = decode_from_worker(bytes);
    EXPECT_EQ(heard.number, said.number);
    EXPECT_EQ(heard.message.index(), said.message.index());
    EXPECT_EQ(encode(heard), bytes);
    const Numbered<FromAgent> ordered{drawn.recovery(), drawn.of_agent()};
    const auto order = encode(ordered);
    EXPECT_EQ(encode(decode_from_agent(order)), order);
    EXPECT_THROW(decode_from_agent(bytes), BadMessage);
    EXPECT_THROW(decode_from_worker(order), BadMessage);
  }
}

TEST(ControlMessages, AreLaidOutAsTheAgentReadsThem) {
  const std::vector<unsigned char> expected{
      18, 0, 0, 0, 13, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 1, 0,
      0,  0, 0, 0, 0,  0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  const auto bytes = encode({RecoveryNumber{2, 3}, FromAgent(Replay{5, 1, 0, 1, {}, {}, {}})});
  ASSERT_EQ(bytes.size(), expected.size());
  for (std::size_t i = 0; i < bytes.size(); ++i) EXPECT_EQ(static_cast<unsigned char>(bytes[i]), expected[i]);
  const auto copied =
      encode({RecoveryNumber{2, 3}, FromAgent(Replay{5, 1, 0, 1, {{3, 9, 8, 4096, 100, 77}}, {}, {}})});
  const std::vector<unsigned char> copy{1, 0, 0, 0, 3,   0, 0, 0, 9, 0, 0, 0, 8,  0, 0, 0, 0, 16, 0, 0,
                                        0, 0, 0, 0, 100, 0, 0, 0, 0, 0, 0, 0, 77, 0, 0, 0, 0, 0,  0, 0};
  ASSERT_EQ(copied.size(), bytes.size() + copy.size() - 4);
  for (std::size_t i = 0; i < copy.size(); ++i)
    EXPECT_EQ(static_cast<unsigned char>(copied[56 + i]), copy[i]);
}

// Cut, lengthened, with changed bytes, or nothing but noise: read as something else, or refused.
TEST(ControlMessages, OfAnyKindDoNoHarm) {
  Drawn drawn;
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    auto bytes = round % 2 == 0 ? encode({drawn.recovery(), drawn.of_worker()})
                                : encode({drawn.recovery(), drawn.of_agent()});
    auto& random = drawn.random();
    switch (round / 2 % 4) {
      case 0:
        bytes.resize(random() % bytes.size());
        break;
      case 1:
        bytes.resize(bytes.size() + 1 + random() % 20);
        break;
      case 2:
        for (std::size_t change = random() % 4 + 1; change-- > 0;)
          bytes[random() % bytes.size()] = static_cast<std::byte>(random());
        break;
      default:
        bytes.resize(random() % 100);
        std::ranges::generate(bytes, [&] { return static_cast<std::byte>(random()); });
    }
    try {
      if (round % 2 == 0)
        EXPECT_EQ(encode(decode_from_worker(bytes)), bytes);
      else
        EXPECT_EQ(encode(decode_from_agent(bytes)), bytes);
    } catch (const BadMessage&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 10000);
}

}  // namespace
}  // namespace jitckpt::proxy::client::control
