// Kernels by number: found in their library when the program first uses one, and the library loaded then.
#pragma once
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "proxy/wire.h"

namespace jitckpt::proxy {

class Kernels {
 public:
  struct Kernel {
    const void* stub;
    std::vector<wire::Parameter> parameters;
    uint32_t parameter_bytes;
  };

  // Gives the kernel this number. Throws CallFailure if the library can't be loaded, or knows no kernel
  // there.
  const Kernel& add(uint64_t number, const std::string& library, uint64_t offset);
  // Throws CallFailure.
  const Kernel& at(uint64_t number);
  const void* stub(uint64_t number) { return at(number).stub; }

 private:
  std::mutex loading_, mutex_;
  std::unordered_map<uint64_t, Kernel> kernels_;  // none is ever taken out
};

}  // namespace jitckpt::proxy
