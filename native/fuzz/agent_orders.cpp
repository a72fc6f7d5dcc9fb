// What the agent orders the preloaded library to do, and the order that the library gives itself.
#include <cstdlib>
#include <string>

#include "interpose/messages.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  using namespace jitckpt::interpose::messages;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  order_of(text);
  save_id_of(text);
  question_of(text);
  // Whatever its reason, it is an order to save, and its number is 0.
  const std::string own = own_save_order(text, 1);
  if (order_of(own) != AgentOrder::save || save_id_of(own) != 0) std::abort();
  return 0;
}
