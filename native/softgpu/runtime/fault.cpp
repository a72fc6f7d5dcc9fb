#include "softgpu/runtime/fault.h"

#include <algorithm>
#include <charconv>
#include <climits>
#include <cmath>
#include <map>
#include <vector>

namespace softgpu {
namespace {

constexpr std::size_t longest_text = 1000;
constexpr double largest_factor = 1e6;

// What a kind is called, what it counts if the text does not say, and the keys that it takes beside rank.
struct Description {
  FaultKind kind;
  const char* name;
  FaultPoint point;
  std::vector<std::string_view> keys;
};

const std::vector<Description>& descriptions() {
  static const auto* all = new std::vector<Description>{
      {FaultKind::sticky, "sticky", FaultPoint::launch, {"call", "at"}},
      {FaultKind::ecc, "ecc", FaultPoint::launch, {"call", "at"}},
      {FaultKind::device_lost, "device-lost", FaultPoint::launch, {"call", "at"}},
      {FaultKind::failed_allocation, "failed-allocation", FaultPoint::allocation, {"call"}},
      {FaultKind::oom, "oom", FaultPoint::allocation, {"call"}},
      {FaultKind::collective_hang, "collective-hang", FaultPoint::collective, {"call"}},
      {FaultKind::collective_error, "collective-error", FaultPoint::collective, {"call", "result"}},
      {FaultKind::network_cut, "network-cut", FaultPoint::collective, {"call", "peer"}},
      {FaultKind::slow, "slow", FaultPoint::launch, {"call", "factor", "part", "peer"}},
      {FaultKind::heal, "heal", FaultPoint::launch, {}},
  };
  return *all;
}

const Description& description_of(FaultKind kind) {
  return *std::find_if(descriptions().begin(), descriptions().end(),
                       [kind](const Description& description) { return description.kind == kind; });
}

// What came from outside, fit to be shown in a line.
std::string shown(std::string_view text) {
  constexpr std::size_t most = 100;
  std::string line(text.substr(0, most));
  for (char& character : line) {
    if (character < ' ' || character > '~') character = '?';
  }
  return "'" + line + (text.size() > most ? "...'" : "'");
}

template <class Words>
std::string listed(const Words& words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? " or " : ", ";
    text += words[i];
  }
  return text;
}

using Values = std::map<std::string_view, std::string_view>;

Values split(std::string_view text) {
  static constexpr std::string_view known[] = {"kind", "rank", "call",   "at",
                                               "peer", "part", "factor", "result"};
  constexpr std::string_view blanks = " \t";
  Values values;
  while (true) {
    const std::size_t begin = std::min(text.find_first_not_of(blanks), text.size());
    text.remove_prefix(begin);
    if (text.empty()) return values;
    const std::string_view part = text.substr(0, text.find_first_of(blanks));
    text.remove_prefix(part.size());
    const std::size_t equals = std::min(part.find('='), part.size());
    const std::string_view key = part.substr(0, equals);
    if (std::find(std::begin(known), std::end(known), key) == std::end(known)) {
      throw FaultSyntax(shown(key) + " is not known; the keys are " +
                        listed(std::vector(std::begin(known), std::end(known))));
    }
    const std::string_view value = part.substr(std::min(equals + 1, part.size()));
    if (!values.emplace(key, value).second) throw FaultSyntax(std::string(key) + " is given twice");
  }
}

template <class Number>
Number number(std::string_view key, std::string_view text, Number least, Number most) {
  Number value{};
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || stop != text.data() + text.size() || !(value >= least && value <= most)) {
    const bool whole = std::is_integral_v<Number>;
    throw FaultSyntax(std::string(key) + " must be a " + (whole ? "whole " : "") + "number of at least " +
                      std::to_string(static_cast<std::uint64_t>(least)) + " and at most " +
                      std::to_string(static_cast<std::uint64_t>(most)) + ", not " + shown(text));
  }
  return value;
}

// Whether the value is the second of the two words, the first of which is meant where nothing is said.
bool is_second(const Values& values, std::string_view key, const char* first, const char* second) {
  const auto found = values.find(key);
  if (found == values.end() || found->second == first) return false;
  if (found->second == second) return true;
  throw FaultSyntax(std::string(key) + " must be " + first + " or " + second + ", not " +
                    shown(found->second));
}

const Description& kind_in(const Values& values) {
  const auto value = values.find("kind");
  if (value == values.end()) throw FaultSyntax("kind is missing");
  std::vector<std::string> names;
  for (const Description& description : descriptions()) {
    if (value->second == description.name) return description;
    names.emplace_back(description.name);
  }
  throw FaultSyntax("kind must be " + listed(names) + ", not " + shown(value->second));
}

}  // namespace

Fault parse_fault(std::string_view text) {
  if (text.size() > longest_text) {
    throw FaultSyntax("the text has " + std::to_string(text.size()) + " bytes, at most " +
                      std::to_string(longest_text) + " are read");
  }
  const Values values = split(text);
  const Description& description = kind_in(values);
  for (const auto& [key, value] : values) {
    const bool fits =
        std::find(description.keys.begin(), description.keys.end(), key) != description.keys.end();
    if (key != "kind" && key != "rank" && !fits)
      throw FaultSyntax(std::string(key) + " does not go with kind=" + description.name);
  }
  Fault fault{.kind = description.kind, .point = description.point};
  // What lasts begins at once unless a call is given; what happens once happens at the next call.
  fault.call = lasts(fault.kind) || fault.kind == FaultKind::heal ? 0 : 1;
  if (const auto value = values.find("call"); value != values.end())
    fault.call = number<std::uint64_t>("call", value->second, 1, 1'000'000'000'000'000'000);
  if (const auto value = values.find("rank"); value != values.end())
    fault.rank = number<int>("rank", value->second, 0, INT_MAX);
  if (const auto value = values.find("peer"); value != values.end())
    fault.peer = number<int>("peer", value->second, 0, INT_MAX);
  if (is_second(values, "at", "launch", "collective")) fault.point = FaultPoint::collective;
  fault.system_error = is_second(values, "result", "remote", "system");
  fault.link = is_second(values, "part", "kernels", "link");
  if (fault.link) fault.point = FaultPoint::collective;
  if (fault.kind == FaultKind::slow) {
    const auto value = values.find("factor");
    if (value == values.end()) throw FaultSyntax("factor is missing");
    fault.factor = number<double>("factor", value->second, 1, largest_factor);
    if (!fault.link && fault.peer != Fault::every_peer) throw FaultSyntax("peer goes only with part=link");
  }
  return fault;
}

std::string to_text(const Fault& fault) {
  const Description& description = description_of(fault.kind);
  std::string text = std::string("kind=") + description.name;
  const auto add = [&text](const char* key, const std::string& value) {
    text += std::string(" ") + key + "=" + value;
  };
  if (fault.rank) add("rank", std::to_string(*fault.rank));
  if (fault.call > 0) add("call", std::to_string(fault.call));
  if (fault.kind != FaultKind::slow && fault.point != description.point) add("at", "collective");
  if (fault.link) add("part", "link");
  if (fault.peer != Fault::every_peer) add("peer", std::to_string(fault.peer));
  if (fault.kind == FaultKind::slow) {
    char digits[32];
    const auto end = std::to_chars(std::begin(digits), std::end(digits), fault.factor).ptr;
    add("factor", std::string(digits, end));
  }
  if (fault.system_error) add("result", "system");
  return text;
}

bool lasts(FaultKind kind) {
  return kind == FaultKind::oom || kind == FaultKind::network_cut || kind == FaultKind::slow;
}

cudaError_t error_of(FaultKind kind) {
  switch (kind) {
    case FaultKind::ecc:
      return cudaErrorECCUncorrectable;
    case FaultKind::device_lost:
      return cudaErrorUnknown;  // what programs get whose GPU has gone (Xid 79), see docs/reference/faults.md
    default:
      return cudaErrorIllegalAddress;
  }
}

const char* name_of(FaultPoint point) {
  switch (point) {
    case FaultPoint::launch:
      return "kernel launch";
    case FaultPoint::allocation:
      return "allocation";
    default:
      return "NCCL call";
  }
}

}  // namespace softgpu
