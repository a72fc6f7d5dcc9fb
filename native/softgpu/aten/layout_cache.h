// What shapes an operator's results have, remembered by everything that they depend on.
#pragma once
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace softgpu::aten {

struct TensorLayout {
  bool defined = false;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::SmallVector<int64_t, 5> sizes, strides;
  size_t bytes = 0;  // from the first element to the end of the last

  bool operator==(const TensorLayout& other) const {
    return defined == other.defined && dtype == other.dtype && sizes == other.sizes &&
           strides == other.strides;
  }
};

struct OutResize {
  size_t tensor;  // which of the call's tensors
  TensorLayout layout;
};

struct ResultLayout {
  bool synchronous = false;           // only running the operator tells
  std::vector<TensorLayout> outputs;  // of all fresh tensors, lists flattened
  std::vector<int> list_lengths;      // per fresh return: the length of a list, -1 for a tensor
  std::vector<OutResize> resizes;     // out= arguments that don't have the shape of the result yet
};

class LayoutCache {
 public:
  // Null if nothing is known.
  std::shared_ptr<const ResultLayout> find(std::string_view key) {
    std::lock_guard lock(mutex_);
    auto found = layouts_.find(key);
    return found == layouts_.end() ? nullptr : found->second;
  }

  void insert(std::string_view key, std::shared_ptr<const ResultLayout> layout) {
    std::lock_guard lock(mutex_);
    if (layouts_.size() >= most_layouts) layouts_.clear();
    layouts_.insert_or_assign(std::string(key), std::move(layout));
  }

 private:
  static constexpr size_t most_layouts = 4096;

  struct Hash {  // keys are long: eight bytes at a time
    using is_transparent = void;
    size_t operator()(std::string_view key) const;
  };

  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<const ResultLayout>, Hash, std::equal_to<>> layouts_;
};

}  // namespace softgpu::aten
