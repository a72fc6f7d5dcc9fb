// What the library says to the agent, and the few words that it understands.
#pragma once
#include <nccl.h>

#include <string>
#include <string_view>
#include <vector>

#include "interpose/communicators.h"
#include "watchdog/rest.h"
#include "watchdog/watch_list.h"

namespace jitckpt::interpose::messages {

enum class AgentOrder { save, resume, ask, unknown };
AgentOrder order_of(std::string_view message);
long long save_id_of(std::string_view order);   // 0 if it has none
long long question_of(std::string_view order);  // likewise

// An order of the library's own, in the agent's form. deadline: seconds.
std::string own_save_order(std::string_view reason, double deadline);

std::string hang(const watchdog::InFlight& oldest, const std::vector<watchdog::InFlight>& in_flight);
std::string nccl_error(const char* operation, ncclResult_t result, const char* text);
std::string progress(long long question, const std::vector<CommunicatorProgress>& communicators,
                     const std::vector<watchdog::InFlight>& in_flight);
std::string held(long long save_id, double seconds, watchdog::RestOutcome rest);

// A JSON array, oldest first; at most `limit` entries.
std::string collectives(const std::vector<watchdog::InFlight>& in_flight, size_t limit);

// In words, for a person.
std::string in_words(const watchdog::InFlight& collective);

}  // namespace jitckpt::interpose::messages
