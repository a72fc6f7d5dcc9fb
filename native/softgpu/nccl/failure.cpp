#include "softgpu/nccl/failure.h"

#include <mutex>

namespace softgpu::nccl {
namespace {

struct Asynchronous {
  std::mutex mutex;
  std::string text;
};
Asynchronous& asynchronous() {
  static auto* const newest = new Asynchronous;  // never destroyed: streams outlive main()
  return *newest;
}

}  // namespace

std::string& last_error() {
  thread_local std::string text;
  return text;
}

void set_asynchronous_error(const std::string& text) {
  const std::lock_guard lock(asynchronous().mutex);
  asynchronous().text = text;
}

std::string asynchronous_error() {
  const std::lock_guard lock(asynchronous().mutex);
  return asynchronous().text;
}

}  // namespace softgpu::nccl
