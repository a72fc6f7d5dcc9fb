// What images and checks have in common: copies of all memory of the device when it has come to rest.
#pragma once
#include <cstring>
#include <set>
#include <vector>

#include "proxy/server/failure.h"
#include "proxy/server/server.h"

namespace jitckpt::proxy {

// The list that follows a record's arguments. Throws CallFailure if it is not all there.
template <class Arguments, class Entry>
std::vector<Entry> entries_after(const Request& request, uint64_t count) {
  const auto rest = request.rest<Arguments>();
  if (count > rest.size() / sizeof(Entry))
    throw CallFailure(cudaErrorInvalidValue, "a list of memory is shorter than its record says");
  std::vector<Entry> entries(count);
  if (count != 0) std::memcpy(entries.data(), rest.data(), count * sizeof(Entry));
  return entries;
}

cudaError_t synchronize(const std::set<int32_t>& devices);
// Waits until the devices have come to rest; not if a collective has failed, or nobody wants the copy.
cudaError_t come_to_rest(const std::set<int32_t>& devices, Server& server);

// Of an image that is to be made: from here on what it is written over counts for nothing. False if it is not
// wanted any more.
bool begin_image(Server& server, uint64_t image);
// Puts the copies onto the legacy streams of their devices.
cudaError_t copy_image(const std::vector<wire::Range>& ranges);
std::set<int32_t> devices_of(const std::vector<wire::Range>& ranges);

}  // namespace jitckpt::proxy
