// Records with any content: the server says that they can't be, or makes their calls of a device that does
// nothing.
#include <sys/mman.h>

#include <cstring>
#include <string_view>

#include "device_api/real_symbols.h"
#include "proxy/server/failure.h"
#include "proxy/server/server.h"
#include "proxy/server/services.h"

namespace jitckpt::real {

// In the place of the libraries: every call succeeds, and touches nothing.
void* find(Library, const char* name) noexcept {
  const std::string_view call(name);
  const bool has_text =
      call.find("Error") != std::string_view::npos || call.find("String") != std::string_view::npos;
  constexpr int (*succeeds)() = [] { return 0; };
  if (call == "cudaLaunchHostFunc") return nullptr;  // who is promised to be called back waits for that
  return has_text && call != "ncclCommGetAsyncError" ? nullptr : reinterpret_cast<void*>(succeeds);
}

}  // namespace jitckpt::real

namespace {

using namespace jitckpt::proxy;

constexpr Geometry geometry{4096, 1};

Log fresh_log() {
  static auto* const begin = static_cast<std::byte*>(mmap(
      nullptr, geometry.bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  const Log log(begin, geometry);
  std::memset(static_cast<void*>(&log.control()), 0, offsetof(ControlBlock, copied));
  log.control().images = Images::made;
  return log;
}

// These name memory, files and libraries of the program's, which it could as well use itself: there is no
// saying whether they are right.
bool relies_on_the_program(Call call) {
  switch (call) {
    case Call::check_memory:
    case Call::compare_state:
    case Call::look_at_state:
    case Call::save_state:
    case Call::restore_state:
    case Call::share_host:
    case Call::find_kernel:
    case Call::make_blas:
    case Call::begin_step:
    case Call::copy_from_host:
      return true;
    default:
      return false;
  }
}

}  // namespace

// Each record is the number of its call, the length of its content, and that.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  Server server(fresh_log());
  for (uint64_t sequence = 1; size >= 3; ++sequence) {
    const auto call = static_cast<uint16_t>((data[0] | data[1] << 8) % static_cast<uint16_t>(Call::count));
    const std::size_t bytes = std::min<std::size_t>(data[2] * record_alignment, size - 3);
    // A copy, so that whoever reads behind the end is found out.
    const std::vector<std::byte> content(reinterpret_cast<const std::byte*>(data) + 3,
                                         reinterpret_cast<const std::byte*>(data) + 3 + bytes);
    data += 3 + bytes;
    size -= 3 + bytes;
    if (relies_on_the_program(static_cast<Call>(call))) continue;
    try {
      server.serve({sequence, call, static_cast<uint16_t>(sequence % slot_count), 0, 0, content.data(),
                    content.size()});
    } catch (const Different&) {
      return 0;  // the server ends with that sentence
    }
  }
  return 0;
}
