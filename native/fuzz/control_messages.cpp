// What the agent and the device proxy say to each other: refused, or read as what it says and nothing else.
#include "proxy/client/control_messages.h"

#include <algorithm>
#include <cstdlib>

namespace {

using namespace jitckpt::proxy::client::control;

template <class Decode>
void comes_back_as_it_was(std::span<const std::byte> bytes, Decode decode) {
  try {
    if (!std::ranges::equal(encode(decode(bytes)), bytes)) std::abort();
  } catch (const BadMessage&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  comes_back_as_it_was(bytes, decode_from_worker);
  comes_back_as_it_was(bytes, decode_from_agent);
  return 0;
}
