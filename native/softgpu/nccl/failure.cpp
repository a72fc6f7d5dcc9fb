#include "failure.h"

namespace softgpu::nccl {

std::string& last_error() {
  thread_local std::string text;
  return text;
}

}  // namespace softgpu::nccl
