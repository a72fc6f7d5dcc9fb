#include "softgpu/aten/rehearse.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include "softgpu/aten/cpu_kernel.h"
#include "softgpu/aten/unpack.h"

namespace softgpu::aten {
namespace {

// Memory that reads as zeros, costs nothing until it is written, and is forgotten afterwards.
class ImaginaryMemory final : public ArgumentMemory {
 public:
  explicit ImaginaryMemory(c10::ArrayRef<Storage> storages) {
    for (const Storage& storage : storages) bytes_ += aligned(storage.bytes);
    if (bytes_ == 0) return;
    start_ =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(start_ != MAP_FAILED, "softgpu could not reserve ", bytes_,
                " bytes of address space to find out an operator's result shapes");
    // An operator in place writes to all of it: in large pages, where there are some, that is far cheaper.
    madvise(start_, bytes_, MADV_HUGEPAGE);
  }
  ~ImaginaryMemory() override {
    if (bytes_ != 0) munmap(start_, bytes_);
  }
  ImaginaryMemory(const ImaginaryMemory&) = delete;
  ImaginaryMemory& operator=(const ImaginaryMemory&) = delete;

  void* address(const Storage& storage) override {
    if (storage.bytes == 0) return nullptr;
    void* place = static_cast<char*>(start_) + used_;
    used_ += aligned(storage.bytes);
    return place;
  }

 private:
  static size_t aligned(size_t bytes) { return (bytes + 511) / 512 * 512; }

  void* start_ = nullptr;
  size_t bytes_ = 0, used_ = 0;
};

ResultLayout run(const Operator& op, const Packed& packed) {
  ImaginaryMemory memory(packed.storages);
  Unpacked unpacked =
      unpack(Reader(packed.key.data(), packed.key.size()), Reader(packed.values.data(), packed.values.size()),
             packed.storages, memory, op.random ? seeded_generator(0) : at::Generator(), true);
  run_cpu_kernel(op, unpacked.stack);
  ResultLayout layout;
  for (const at::Tensor& result : fresh_results(op, unpacked.stack, layout.list_lengths)) {
    layout.outputs.push_back(layout_of(op, result));
  }
  for (size_t i = 0; i < unpacked.outs.size(); ++i) {
    TensorLayout wanted = layout_of(op, unpacked.outs[i]);
    if (!(wanted == layout_of(op, packed.tensors[packed.outs[i]]))) {
      layout.resizes.push_back({.tensor = packed.outs[i], .layout = std::move(wanted)});
    }
  }
  return layout;
}

}  // namespace

std::shared_ptr<const ResultLayout> rehearse(const Operator& op, const Packed& packed) {
  auto layout = std::make_shared<ResultLayout>();
  if (!op.rehearsable) {
    layout->synchronous = !op.returns.empty();
    return layout;
  }
  try {
    *layout = run(op, packed);
  } catch (const std::exception&) {
    layout->synchronous = true;  // the run on the real data reports what is wrong, if anything is
  }
  return layout;
}

}  // namespace softgpu::aten
