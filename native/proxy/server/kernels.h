// Kernels by number: found in their library when the program first uses one, and the library loaded then.
#pragma once
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "wire.h"

namespace jitckpt::proxy {

class Kernels {
 public:
  struct Kernel {
    uint64_t number;
    const void* stub;
    std::vector<wire::Parameter> parameters;
    uint32_t parameter_bytes;
  };

  // Throws Failure if the library can't be loaded, or knows no kernel there.
  const Kernel& find(const std::string& library, uint64_t offset);
  // Throws Failure.
  const Kernel& at(uint64_t number);
  const void* stub(uint64_t number) { return at(number).stub; }

 private:
  std::mutex mutex_;
  std::deque<Kernel> kernels_;  // their numbers are their places, from 1
  std::map<std::pair<std::string, uint64_t>, const Kernel*> found_;
};

}  // namespace jitckpt::proxy
