// The text of a fault on order: refused with a sentence, or the same again once it is written down.
#include <cstdlib>
#include <string_view>

#include "softgpu/runtime/fault.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  using namespace softgpu;
  try {
    const std::string text = to_text(parse_fault({reinterpret_cast<const char*>(data), size}));
    if (to_text(parse_fault(text)) != text) std::abort();
  } catch (const FaultSyntax& wrong) {
    if (std::string_view(wrong.what()).empty()) std::abort();
  }
  return 0;
}
