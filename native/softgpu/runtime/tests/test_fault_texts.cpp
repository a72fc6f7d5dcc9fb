// The text of a fault, which comes from outside: whatever it holds, it is a fault or a sentence.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "softgpu/runtime/fault.h"

using softgpu::Fault;
using softgpu::FaultKind;
using softgpu::FaultPoint;
using softgpu::FaultSyntax;
using softgpu::parse_fault;
using softgpu::to_text;

namespace {

std::string complaint(std::string_view text) {
  try {
    return "no complaint: " + to_text(parse_fault(text));
  } catch (const FaultSyntax& wrong) {
    return wrong.what();
  }
}

}  // namespace

TEST(FaultTexts, MeanWhatTheySay) {
  const Fault sticky = parse_fault("  kind=sticky\tcall=3  at=collective rank=2 ");
  EXPECT_EQ(sticky.kind, FaultKind::sticky);
  EXPECT_EQ(sticky.call, 3u);
  EXPECT_EQ(sticky.point, FaultPoint::collective);
  EXPECT_EQ(sticky.rank, 2);
  EXPECT_EQ(to_text(sticky), "kind=sticky rank=2 call=3 at=collective");

  EXPECT_EQ(parse_fault("kind=ecc").call, 1u) << "what happens once happens at the next call";
  EXPECT_EQ(parse_fault("kind=oom").call, 0u) << "what lasts begins at once";
  EXPECT_EQ(parse_fault("kind=network-cut").peer, Fault::every_peer);
  EXPECT_EQ(parse_fault("kind=collective-error result=system").system_error, true);
  const Fault slow = parse_fault("kind=slow factor=2.5 part=link peer=1");
  EXPECT_EQ(slow.factor, 2.5);
  EXPECT_TRUE(slow.link);
  EXPECT_EQ(slow.point, FaultPoint::collective);
}

TEST(FaultTexts, ThatAreWrongAreExplained) {
  EXPECT_EQ(complaint(""), "kind is missing");
  EXPECT_EQ(
      complaint("kind=burn"),
      "kind must be sticky, ecc, device-lost, failed-allocation, oom, collective-hang, collective-error, "
      "network-cut, slow or heal, not 'burn'");
  EXPECT_EQ(complaint("kind=sticky step=3"),
            "'step' is not known; the keys are kind, rank, call, at, peer, part, factor or result");
  EXPECT_EQ(complaint("kind=sticky kind=ecc"), "kind is given twice");
  EXPECT_EQ(complaint("kind=sticky call=0"),
            "call must be a whole number of at least 1 and at most 1000000000000000000, not '0'");
  EXPECT_NE(complaint("kind=sticky call=-1").find("not '-1'"), std::string::npos);
  EXPECT_NE(complaint("kind=sticky call=1x").find("not '1x'"), std::string::npos);
  EXPECT_NE(complaint("kind=sticky call").find("not ''"), std::string::npos);
  EXPECT_NE(complaint("kind=sticky call=99999999999999999999").find("call must be"), std::string::npos);
  EXPECT_EQ(complaint("kind=sticky peer=1"), "peer does not go with kind=sticky");
  EXPECT_EQ(complaint("kind=sticky at=malloc"), "at must be launch or collective, not 'malloc'");
  EXPECT_EQ(complaint("kind=slow"), "factor is missing");
  EXPECT_EQ(complaint("kind=slow factor=0.5"),
            "factor must be a number of at least 1 and at most 1000000, not '0.5'");
  EXPECT_NE(complaint("kind=slow factor=nan").find("not 'nan'"), std::string::npos);
  EXPECT_NE(complaint("kind=slow factor=inf").find("not 'inf'"), std::string::npos);
  EXPECT_EQ(complaint("kind=slow factor=2 peer=1"), "peer goes only with part=link");
  EXPECT_EQ(complaint("kind=heal call=1"), "call does not go with kind=heal");
  EXPECT_NE(complaint(std::string("kind=sti\0cky\n", 13)).find("not 'sti?cky?'"), std::string::npos)
      << "no byte of it breaks the line";
  EXPECT_EQ(complaint(std::string(2000, 'x')), "the text has 2000 bytes, at most 1000 are read");
}

// Random bytes, and known texts with random bytes changed, put in and left out.
TEST(FaultTexts, OfRandomBytesNeverCrash) {
  std::mt19937 chance(2026);
  const auto below = [&chance](std::size_t limit) {
    return std::uniform_int_distribution<std::size_t>(0, limit - 1)(chance);
  };
  const std::string texts[] = {"kind=sticky call=3 at=collective rank=2",
                               "kind=slow factor=2.5 part=link peer=1 call=7",
                               "kind=collective-error result=system",
                               "kind=network-cut peer=2147483647",
                               "kind=heal",
                               ""};
  int understood = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string text = texts[below(std::size(texts))];
    for (std::size_t change = below(8); change > 0; --change) {
      const std::size_t place = below(text.size() + 1);
      const char byte = static_cast<char>(below(3) == 0 ? below(256) : "kind=call 0129.- "[below(17)]);
      if (place < text.size() && below(2)) {
        text[place] = byte;
      } else if (place < text.size() && below(2)) {
        text.erase(place, 1 + below(4));
      } else {
        text.insert(place, 1, byte);
      }
    }
    const std::string said = complaint(text);
    EXPECT_TRUE(std::all_of(said.begin(), said.end(), [](char c) { return c >= ' ' && c <= '~'; })) << said;
    if (!said.starts_with("no complaint: ")) continue;
    ++understood;
    const Fault fault = parse_fault(text);
    EXPECT_EQ(to_text(parse_fault(to_text(fault))), to_text(fault));
  }
  EXPECT_GT(understood, 1000);
}
