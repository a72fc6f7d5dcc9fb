#include "softgpu/runtime/published_file.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "softgpu/runtime/error.h"

namespace softgpu {
namespace {

constexpr std::uint64_t page = 4096, largest_file = std::uint64_t{1} << 62;

int file_of_parent = -1;  // what a forked child, which has no device, must not keep alive

CudaFailure system_failure(const std::string& what) {
  return {cudaErrorOperatingSystem, what + " (" + std::strerror(errno) + ")"};
}

void* map_file(int file, std::uint64_t place, std::size_t bytes, void* address) {
  void* const begin =
      mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | (address ? MAP_FIXED : 0),
           file, static_cast<off_t>(place));
  if (begin == MAP_FAILED) {
    throw CudaFailure{cudaErrorMemoryAllocation, "can't map " + std::to_string(bytes) + " bytes of memory (" +
                                                     std::strerror(errno) + ")"};
  }
  madvise(begin, bytes, MADV_DONTFORK);
  return begin;
}

// A published piece is marked by a lock of its range, which ends with its owner at the latest. Of an open
// file: locks of processes would vanish whenever any descriptor of the file is closed.
bool set_lock(int file, short type, std::uint64_t place, std::size_t bytes) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(place);
  lock.l_len = static_cast<off_t>(bytes);
  return fcntl(file, F_OFD_SETLK, &lock) == 0;
}

bool is_published(int file, const SharedPiece& piece) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(piece.place);
  lock.l_len = static_cast<off_t>(piece.bytes);
  return fcntl(file, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

}  // namespace

PublishedFile& PublishedFile::get() {
  static auto* const file = new PublishedFile;  // never destroyed: streams outlive main()
  return *file;
}

PublishedFile::PublishedFile()
    : file_(memfd_create("softgpu", MFD_CLOEXEC)), next_place_(0), end_(largest_file) {
  if (file_ < 0) throw system_failure("can't make a file for the devices' memory");
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < end_) end_ = limit.rlim_cur / page * page;
  struct stat status{};
  if (fchmod(file_, S_IRUSR | S_IWUSR) != 0 || ftruncate(file_, static_cast<off_t>(end_)) != 0 ||
      fstat(file_, &status) != 0) {
    const CudaFailure failure = system_failure("can't make a file for the devices' memory");
    close(file_);
    throw failure;
  }
  inode_ = status.st_ino;
  file_of_parent = file_;
  pthread_atfork(nullptr, nullptr, [] { close(file_of_parent); });
}

std::uint64_t PublishedFile::reserve(std::size_t bytes) {
  const std::uint64_t place = std::atomic_ref(next_place_).fetch_add(bytes);
  if (place > end_ || bytes > end_ - place) {
    throw CudaFailure{cudaErrorMemoryAllocation,
                      "the limit on the size of files (ulimit -f) leaves no more memory for the devices"};
  }
  return place;
}

void PublishedFile::give_back(std::uint64_t place, std::size_t bytes) noexcept {
  set_lock(file_, F_UNLCK, place, bytes);  // it fails only where locks are unknown, and nothing was published
  if (fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(place),
                static_cast<off_t>(bytes)) != 0) {
    std::fprintf(stderr, "softgpu: can't give %zu bytes of memory back to the system (%s)\n", bytes,
                 std::strerror(errno));
  }
}

void* PublishedFile::map(std::uint64_t place, std::size_t bytes, void* address) const {
  return map_file(file_, place, bytes, address);
}

SharedPiece PublishedFile::publish(SharedPiece::Kind kind, int device, std::uint64_t place,
                                   std::size_t bytes) const {
  if (!set_lock(file_, F_WRLCK, place, bytes)) throw system_failure("can't mark memory as shared");
  return {.kind = kind,
          .device = device,
          .process = getpid(),
          .file = file_,
          .inode = inode_,
          .place = place,
          .bytes = bytes};
}

void require_foreign(const SharedPiece& piece, SharedPiece::Kind kind) {
  require(piece.kind == kind, cudaErrorInvalidValue,
          kind == SharedPiece::Kind::memory ? "the handle does not come from cudaIpcGetMemHandle"
                                            : "the handle does not come from cudaIpcGetEventHandle");
  require(piece.process != getpid(), cudaErrorDeviceUninitialized,
          "a handle can't be opened in the process that it comes from");
  require(piece.bytes > 0 && piece.bytes % page == 0 && piece.place % page == 0, cudaErrorInvalidValue,
          "the handle is damaged");
}

void* map_foreign(const SharedPiece& piece, void* address) {
  const std::string path = "/proc/" + std::to_string(piece.process) + "/fd/" + std::to_string(piece.file);
  struct OpenFile {
    ~OpenFile() {
      if (number >= 0) close(number);
    }
    const int number;
  } const file{open(path.c_str(), O_RDWR | O_CLOEXEC)};
  if (file.number < 0) {
    throw CudaFailure{cudaErrorMapBufferObjectFailed,
                      "the process " + std::to_string(piece.process) +
                          " that the handle comes from has ended, or belongs to another user (" +
                          std::strerror(errno) + ")"};
  }
  struct stat status{};
  require(fstat(file.number, &status) == 0 && status.st_ino == piece.inode, cudaErrorMapBufferObjectFailed,
          "the process that the handle comes from has ended");
  require(is_published(file.number, piece), cudaErrorMapBufferObjectFailed,
          "what the handle stands for has been freed by the process that it comes from");
  return map_file(file.number, piece.place, piece.bytes, address);
}

}  // namespace softgpu
