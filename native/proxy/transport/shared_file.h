// A file without a name that two processes map: gone with the last of them.
#pragma once
#include <cstddef>

namespace jitckpt::proxy {

class SharedFile {
 public:
  // Makes one of so many bytes; they cost memory only once they are written. Throws std::system_error.
  SharedFile(const char* name, std::size_t bytes);
  // One that another process has made. Throws std::system_error.
  explicit SharedFile(int descriptor);
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  int descriptor() const { return descriptor_; }
  std::size_t bytes() const { return bytes_; }

 private:
  int descriptor_;
  std::size_t bytes_;
};

// The file's memory in this process; forked children don't get it.
class Mapping {
 public:
  // address: null for anywhere, else exactly there. Throws std::system_error, also if something else is
  // there.
  explicit Mapping(const SharedFile& file, void* address = nullptr);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* begin() const { return begin_; }
  std::size_t bytes() const { return bytes_; }
  bool holds(const void* pointer) const {
    return static_cast<std::size_t>(static_cast<const std::byte*>(pointer) - begin_) < bytes_;
  }

 private:
  std::byte* begin_;
  std::size_t bytes_;
};

}  // namespace jitckpt::proxy
