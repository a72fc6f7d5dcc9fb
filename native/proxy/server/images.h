// What images and checks have in common: copies of all memory of the device when it has come to rest.
#pragma once
#include <set>

#include "server.h"

namespace jitckpt::proxy {

cudaError_t synchronize(const std::set<int32_t>& devices);
// Waits until the devices have come to rest; not if a collective has failed, or nobody wants the copy.
cudaError_t come_to_rest(const std::set<int32_t>& devices, Server& server);

}  // namespace jitckpt::proxy
