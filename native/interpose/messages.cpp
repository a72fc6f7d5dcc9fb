#include "interpose/messages.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace jitckpt::interpose::messages {
namespace {

constexpr size_t collectives_in_a_message = 100;
constexpr size_t communicators_in_a_message = 100;
// All-to-all is made of sends to everybody: who has more peers than this is not asked about each.
constexpr size_t peers_in_a_message = 32;

std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char character : text) {
    if (character == '"' || character == '\\') {
      result += '\\';
      result += character;
    } else if (static_cast<unsigned char>(character) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", character);
      result += escaped;
    } else {
      result += character;
    }
  }
  return result + '"';
}

std::string number(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.6f", value);
  return text;
}

std::string begin(std::string_view type) {
  const double now =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  return "{\"type\":" + quoted(type) + ",\"time\":" + number(now);
}

std::string identity(uint64_t communicator) {
  char text[24];
  std::snprintf(text, sizeof text, "\"%016llx\"", static_cast<unsigned long long>(communicator));
  return text;
}

std::string counts(const std::map<int, uint64_t>& by_peer) {
  if (by_peer.size() > peers_in_a_message) return "null";
  std::string list;
  for (const auto& [peer, count] : by_peer) {
    list += std::string(list.empty() ? "[" : ",[") + std::to_string(peer) + "," + std::to_string(count) + "]";
  }
  return "[" + list + "]";
}

long long number_of(std::string_view order, std::string_view key) {
  const size_t found = order.find(key);
  if (found == std::string_view::npos) return 0;
  return std::atoll(std::string(order.substr(found + key.size(), 24)).c_str());
}

std::string fields(const watchdog::InFlight& entry) {
  const watchdog::Watch& watch = entry.watch;
  std::string exchanges;
  for (size_t index = 0; index < watch.exchanges.size() && index < peers_in_a_message; ++index) {
    const watchdog::PointToPoint& exchange = watch.exchanges[index];
    exchanges += std::string(index ? ",[" : "[") + (exchange.send ? "true" : "false") + "," +
                 std::to_string(exchange.peer) + "," + std::to_string(exchange.number) + "]";
  }
  return "\"communicator\":" + identity(watch.communicator) + ",\"exchanges\":[" + exchanges + "]" +
         ",\"sequence\":" + std::to_string(watch.sequence) + ",\"operation\":" + quoted(watch.operation) +
         ",\"calls\":" + std::to_string(watch.calls) + ",\"bytes\":" + std::to_string(watch.bytes) +
         ",\"seconds\":" + number(entry.seconds);
}

}  // namespace

AgentOrder order_of(std::string_view message) {
  if (message.starts_with("{\"type\":\"save\"")) return AgentOrder::save;
  if (message.starts_with("{\"type\":\"resume\"")) return AgentOrder::resume;
  if (message.starts_with("{\"type\":\"ask\"")) return AgentOrder::ask;
  return AgentOrder::unknown;
}

long long save_id_of(std::string_view order) { return number_of(order, "\"save_id\":"); }
long long question_of(std::string_view order) { return number_of(order, "\"question\":"); }

std::string own_save_order(std::string_view reason, double deadline) {
  return "{\"type\":\"save\",\"save_id\":0,\"reason\":" + quoted(reason) +
         ",\"deadline\":" + number(deadline) + "}";
}

std::string hang(const watchdog::InFlight& oldest, const std::vector<watchdog::InFlight>& in_flight) {
  return begin("hang") + "," + fields(oldest) +
         ",\"collectives\":" + collectives(in_flight, collectives_in_a_message) + "}";
}

std::string nccl_error(const char* operation, ncclResult_t result, const char* text) {
  return begin("nccl_error") + ",\"operation\":" + quoted(operation) +
         ",\"result\":" + std::to_string(static_cast<int>(result)) + ",\"text\":" + quoted(text) + "}";
}

std::string progress(long long question, const std::vector<CommunicatorProgress>& communicators,
                     const std::vector<watchdog::InFlight>& in_flight) {
  std::string list;
  for (size_t index = 0; index < communicators.size() && index < communicators_in_a_message; ++index) {
    const CommunicatorProgress& one = communicators[index];
    list += std::string(index ? "," : "") + "{\"communicator\":" + identity(one.identity) +
            ",\"rank\":" + std::to_string(one.rank) + ",\"ranks\":" + std::to_string(one.ranks) +
            ",\"sequence\":" + std::to_string(one.sequence) + ",\"sends\":" + counts(one.sends) +
            ",\"receives\":" + counts(one.receives) + "}";
  }
  std::vector<watchdog::InFlight> oldest;
  for (const auto& entry : in_flight) {
    if (entry.oldest) oldest.push_back(entry);
  }
  return begin("progress") + ",\"question\":" + std::to_string(question) + ",\"communicators\":[" + list +
         "],\"collectives\":" + collectives(oldest, 20) + "}";
}

std::string held(long long save_id, double seconds, watchdog::RestOutcome rest) {
  return begin("held") + ",\"save_id\":" + std::to_string(save_id) + ",\"seconds\":" + number(seconds) +
         ",\"rest\":" + quoted(name(rest)) + "}";
}

std::string collectives(const std::vector<watchdog::InFlight>& in_flight, size_t limit) {
  std::string list = "[";
  for (size_t index = 0; index < in_flight.size() && index < limit; ++index) {
    list += (index ? ",{" : "{") + fields(in_flight[index]) +
            ",\"oldest\":" + (in_flight[index].oldest ? "true" : "false") + "}";
  }
  return list + "]";
}

std::string in_words(const watchdog::InFlight& collective) {
  const watchdog::Watch& watch = collective.watch;
  char text[200];
  std::snprintf(text, sizeof text,
                "%s (communicator %016llx, number %llu, %llu bytes) is unfinished after %.1f s",
                watch.operation, static_cast<unsigned long long>(watch.communicator),
                static_cast<unsigned long long>(watch.sequence), static_cast<unsigned long long>(watch.bytes),
                collective.seconds);
  return text;
}

}  // namespace jitckpt::interpose::messages
