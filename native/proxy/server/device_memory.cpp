#include "proxy/server/device_memory.h"

#include <cuda.h>

#include <cstdio>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "proxy/server/server.h"
#include "real_calls.h"

namespace jitckpt::proxy {
namespace {

void* memory_at(uint64_t address) { return reinterpret_cast<void*>(address); }

// The codes of driver and runtime agree for what these functions return.
cudaError_t result_of(CUresult result) { return static_cast<cudaError_t>(result); }

template <class Function>
Function* driver_function(const char* name) {
  constexpr unsigned version = 12000;  // since when none of them has changed
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  if (real::cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result) !=
      cudaSuccess)
    real::cudaGetLastError();
  return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function*>(found) : nullptr;
}

// Memory that the driver maps where we say: each device has windows of addresses, of which pieces are taken.
class PlacedMemory {
 public:
  // Whether this device's driver can do that.
  bool serves(int32_t device) {
    std::lock_guard lock(mutex_);
    return granularity(device) != 0;
  }
  bool has(uint64_t address) {
    std::lock_guard lock(mutex_);
    return pieces_.contains(address);
  }

  cudaError_t allocate(void** memory, uint64_t wanted, uint64_t bytes, int32_t device) {
    std::lock_guard lock(mutex_);
    const uint64_t granule = granularity(device);
    const uint64_t length = (bytes + granule - 1) / granule * granule;
    const std::optional<uint64_t> address =
        wanted != 0 ? at(wanted, length) : lowest_free(length, window_of(device));
    if (!address) return cudaErrorMemoryAllocation;
    Piece piece{length, device, 0};
    if (const CUresult made = create_(&piece.handle, length, properties(device).get(), 0);
        made != CUDA_SUCCESS)
      return result_of(made);
    if (const CUresult mapped = map_(*address, length, 0, piece.handle, 0); mapped != CUDA_SUCCESS) {
      release_(piece.handle);
      return result_of(mapped);
    }
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, {device}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    if (const CUresult allowed = set_access_(*address, length, &access, 1); allowed != CUDA_SUCCESS) {
      unmap_(*address, length);
      release_(piece.handle);
      return result_of(allowed);
    }
    pieces_[*address] = piece;
    *memory = memory_at(*address);
    return cudaSuccess;
  }

  cudaError_t free(uint64_t address) {
    std::lock_guard lock(mutex_);
    const auto piece = pieces_.extract(address);
    const CUresult unmapped = unmap_(address, piece.mapped().bytes);
    const CUresult released = release_(piece.mapped().handle);
    return result_of(unmapped != CUDA_SUCCESS ? unmapped : released);
  }

  int32_t device_of(uint64_t address) {
    std::lock_guard lock(mutex_);
    return pieces_.at(address).device;
  }

 private:
  struct Piece {
    uint64_t bytes;
    int32_t device;
    CUmemGenericAllocationHandle handle;
  };
  struct Properties {
    CUmemAllocationProp value{};
    const CUmemAllocationProp* get() const { return &value; }
  };

  static constexpr uint64_t window_bytes = uint64_t{1} << 39;  // more than any device has
  // Where neither programs nor the loader nor CUDA itself put anything, the first that the driver agrees to.
  static constexpr uint64_t first_windows[] = {0x2000'0000'0000, 0x3000'0000'0000, 0x1000'0000'0000,
                                               0x6000'0000'0000, 0x4000'0000'0000};

  static Properties properties(int32_t device) {
    Properties all;
    all.value.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    all.value.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
    return all;
  }

  // 0: the driver places no memory.
  uint64_t granularity(int32_t device) {
    if (const auto known = granularities_.find(device); known != granularities_.end()) return known->second;
    std::size_t granule = 0;
    if (!reserve_ || !create_ || !map_ || !set_access_ || !unmap_ || !release_ || !give_back_ ||
        !granularity_ || real::cudaFree(nullptr) != cudaSuccess ||  // the device's context has to be there
        granularity_(&granule, properties(device).get(), CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) !=
            CUDA_SUCCESS ||
        window_of(device) == 0) {
      real::cudaGetLastError();
      granule = 0;
    }
    return granularities_[device] = granule;
  }

  // Where the device's window begins; 0 if the driver gives none.
  uint64_t window_of(int32_t device) {
    if (const auto known = windows_.find(device); known != windows_.end()) return known->second;
    for (const uint64_t first : first_windows) {
      const uint64_t begin = first + static_cast<uint64_t>(device) * window_bytes;
      if (reserve(begin)) return windows_[device] = begin;
    }
    return 0;
  }

  bool reserve(uint64_t begin) {
    if (reserved_.contains(begin)) return true;
    CUdeviceptr got = 0;
    if (reserve_(&got, window_bytes, 0, begin, 0) != CUDA_SUCCESS) return false;
    if (got != begin) {
      give_back_(got, window_bytes);
      return false;
    }
    reserved_[begin] = true;
    return true;
  }

  // An earlier server's address, whose window may be another one than ours.
  std::optional<uint64_t> at(uint64_t wanted, uint64_t length) {
    if (!reserve(wanted / window_bytes * window_bytes)) return std::nullopt;
    const auto after = pieces_.lower_bound(wanted);
    if (after != pieces_.end() && after->first < wanted + length) return std::nullopt;
    if (after != pieces_.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second.bytes > wanted) return std::nullopt;
    }
    return wanted;
  }

  // Lowest fitting place first: the same calls give the same addresses.
  std::optional<uint64_t> lowest_free(uint64_t length, uint64_t window) const {
    uint64_t begin = window;
    for (auto piece = pieces_.lower_bound(window); piece != pieces_.end(); ++piece) {
      if (piece->first >= begin + length) break;
      begin = piece->first + piece->second.bytes;
    }
    if (window == 0 || begin + length > window + window_bytes) return std::nullopt;
    return begin;
  }

  decltype(&::cuMemAddressReserve) reserve_ =
      driver_function<decltype(::cuMemAddressReserve)>("cuMemAddressReserve");
  decltype(&::cuMemAddressFree) give_back_ =
      driver_function<decltype(::cuMemAddressFree)>("cuMemAddressFree");
  decltype(&::cuMemCreate) create_ = driver_function<decltype(::cuMemCreate)>("cuMemCreate");
  decltype(&::cuMemRelease) release_ = driver_function<decltype(::cuMemRelease)>("cuMemRelease");
  decltype(&::cuMemMap) map_ = driver_function<decltype(::cuMemMap)>("cuMemMap");
  decltype(&::cuMemUnmap) unmap_ = driver_function<decltype(::cuMemUnmap)>("cuMemUnmap");
  decltype(&::cuMemSetAccess) set_access_ = driver_function<decltype(::cuMemSetAccess)>("cuMemSetAccess");
  decltype(&::cuMemGetAllocationGranularity) granularity_ =
      driver_function<decltype(::cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity");
  std::mutex mutex_;
  std::map<int32_t, uint64_t> granularities_, windows_;  // by device
  std::map<uint64_t, bool> reserved_;                    // windows, by their beginning
  std::map<uint64_t, Piece> pieces_;                     // by address
};

PlacedMemory& placed() {
  static auto* const all = new PlacedMemory;  // as long as the process
  return *all;
}

// Where CUDA chooses: what lies in front of the wanted place is taken for a moment.
cudaError_t allocate_by_cuda(void** memory, uint64_t wanted, uint64_t bytes) {
  constexpr std::size_t most_attempts = 10'000;
  std::vector<void*> in_front;
  cudaError_t result = real::cudaMalloc(memory, bytes);
  while (result == cudaSuccess && wanted != 0 && *memory != memory_at(wanted) &&
         in_front.size() < most_attempts) {
    const uint64_t begin = reinterpret_cast<uint64_t>(*memory);
    real::cudaFree(*memory);
    // All of the gap, if it reaches so far; else a piece of it.
    const uint64_t gap = begin < wanted ? wanted - begin : bytes;
    result = real::cudaMalloc(memory, gap);
    if (result == cudaSuccess && reinterpret_cast<uint64_t>(*memory) != begin) {
      real::cudaFree(*memory);
      result = real::cudaMalloc(memory, bytes);
    }
    if (result == cudaSuccess) {
      in_front.push_back(*memory);
      result = real::cudaMalloc(memory, bytes);
    }
  }
  for (void* other : in_front) real::cudaFree(other);
  return result;
}

}  // namespace

cudaError_t allocate_device_memory(void** memory, uint64_t wanted, uint64_t bytes, int32_t device) {
  if (bytes != 0 && placed().serves(device)) return placed().allocate(memory, wanted, bytes, device);
  return allocate_by_cuda(memory, wanted, bytes);
}

cudaError_t free_device_memory(uint64_t address) {
  if (!placed().has(address)) return real::cudaFree(memory_at(address));
  choose_device(placed().device_of(address));
  if (const cudaError_t waited = real::cudaDeviceSynchronize(); waited != cudaSuccess) return waited;
  return placed().free(address);
}

}  // namespace jitckpt::proxy
