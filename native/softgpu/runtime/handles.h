// Handles that programs hold of our objects. A handle is the object's address, looked up before it is used:
// one that was destroyed or never made is an error, not a crash.
#pragma once
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "softgpu/runtime/error.h"

namespace softgpu {

template <class Handle, class Object>
class HandleTable {
 public:
  Handle add(std::shared_ptr<Object> object) {
    const Handle handle = reinterpret_cast<Handle>(object.get());
    std::lock_guard lock(mutex_);
    objects_.emplace(handle, std::move(object));
    return handle;
  }

  // Null for a handle that is not in the table.
  std::shared_ptr<Object> find(Handle handle) {
    std::lock_guard lock(mutex_);
    const auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }

  std::shared_ptr<Object> remove(Handle handle) {
    std::lock_guard lock(mutex_);
    const auto node = objects_.extract(handle);
    return node.empty() ? nullptr : node.mapped();
  }

  template <class Predicate>
  std::vector<std::shared_ptr<Object>> remove_if(Predicate predicate) {
    std::vector<std::shared_ptr<Object>> removed;
    std::lock_guard lock(mutex_);
    std::erase_if(objects_, [&](const auto& entry) {
      if (!predicate(*entry.second)) return false;
      removed.push_back(entry.second);
      return true;
    });
    return removed;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<Handle, std::shared_ptr<Object>> objects_;
};

}  // namespace softgpu
