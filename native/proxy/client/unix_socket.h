// To the agent.
#pragma once
#include <string>

namespace jitckpt::proxy::client {

// A SOCK_SEQPACKET socket that is connected to this path; -1 with errno if it can't be.
int connect_to(const std::string& path);

}  // namespace jitckpt::proxy::client
