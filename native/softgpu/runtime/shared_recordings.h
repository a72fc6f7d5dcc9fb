// The recordings of an event that several processes use: one page of memory that they all map. Each of them
// may record it and wait for it.
#pragma once
#include <cstdint>
#include <memory>

#include "softgpu/runtime/device.h"
#include "softgpu/runtime/published_file.h"

namespace softgpu {

class SharedRecordings : public std::enable_shared_from_this<SharedRecordings> {
 public:
  static std::shared_ptr<SharedRecordings> create();
  // Throws CudaFailure.
  static std::shared_ptr<SharedRecordings> open(const SharedPiece& piece);

  virtual ~SharedRecordings() = default;
  SharedRecordings(const SharedRecordings&) = delete;
  SharedRecordings& operator=(const SharedRecordings&) = delete;

  // Recordings are numbered from 1, whatever process makes them.
  std::uint64_t newest() const;  // 0: none
  // Throws CudaFailure if too many are unfinished.
  std::uint64_t begin();
  void finish(std::uint64_t number);
  bool finished(std::uint64_t number) const;

  // Blocks until the recording is finished, or the device that waits has failed. The end of a process that
  // has begun a recording does not finish it, as the death of a rank ends no collective.
  void wait(std::uint64_t number, const Device& waiting) const;

  // For other processes, as long as this object exists. Throws CudaFailure for what another process has
  // created.
  virtual SharedPiece publish(int device) const = 0;

 protected:
  struct Page;
  explicit SharedRecordings(Page* page) : page_(page) {}
  Page* const page_;
};

}  // namespace softgpu
