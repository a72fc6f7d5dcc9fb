// The memory of this process that other processes may map (device memory, events between processes): one
// file without a name, which is gone with the last process that has it open or mapped.
#pragma once
#include <cstddef>
#include <cstdint>

namespace softgpu {

// What another process needs to find a piece of this one's file; plain data, for CUDA's opaque handles. Who
// may look at this process under /proc may open it: the same user, and root.
struct SharedPiece {
  enum class Kind : std::uint32_t { memory = 0x53474d31, event = 0x53474531 };  // "SGM1", "SGE1"
  Kind kind;
  std::int32_t device;  // its number on the machine
  std::int32_t process, file;
  std::uint64_t inode;
  std::uint64_t place, bytes;
};

class PublishedFile {
 public:
  static PublishedFile& get();

  // A piece of zeros for `bytes` (whole pages). No place is ever used twice: who still maps a piece that was
  // given back sees zeros, never somebody else's data.
  std::uint64_t reserve(std::size_t bytes);
  void give_back(std::uint64_t place, std::size_t bytes) noexcept;

  // Maps a piece at the address (null: anywhere), readable and writable. Throws CudaFailure.
  void* map(std::uint64_t place, std::size_t bytes, void* address) const;

  // Lets other processes open the piece until it is given back.
  SharedPiece publish(SharedPiece::Kind kind, int device, std::uint64_t place, std::size_t bytes) const;

 private:
  PublishedFile();

  int file_;
  std::uint64_t inode_ = 0, next_place_, end_;
};

// Throws CudaFailure unless it is a piece of this kind, from another process.
void require_foreign(const SharedPiece& piece, SharedPiece::Kind kind);

// Maps another process's piece at the address (null: anywhere). Throws CudaFailure if that process has ended,
// has given the piece back, or belongs to somebody else.
void* map_foreign(const SharedPiece& piece, void* address);

}  // namespace softgpu
