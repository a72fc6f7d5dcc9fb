#include "proxy/transport/shared_file.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace jitckpt::proxy {
namespace {

std::system_error failure(const char* what) { return {errno, std::generic_category(), what}; }

}  // namespace

SharedFile::SharedFile(const char* name, std::size_t bytes)
    : descriptor_(memfd_create(name, MFD_CLOEXEC)), bytes_(bytes) {
  if (descriptor_ < 0) throw failure("the device proxy can't make its shared memory");
  if (fchmod(descriptor_, S_IRUSR | S_IWUSR) != 0 || ftruncate(descriptor_, static_cast<off_t>(bytes)) != 0) {
    const auto error = failure("the device proxy can't make its shared memory");
    close(descriptor_);
    throw error;
  }
}

SharedFile::SharedFile(int descriptor) : descriptor_(descriptor), bytes_(0) {
  struct stat status{};
  if (fstat(descriptor, &status) != 0) throw failure("the device proxy was not given its shared memory");
  bytes_ = static_cast<std::size_t>(status.st_size);
}

SharedFile::~SharedFile() { close(descriptor_); }

Mapping::Mapping(const SharedFile& file, void* address) : begin_(nullptr), bytes_(file.bytes()) {
  void* const begin =
      mmap(address, bytes_, PROT_READ | PROT_WRITE,
           MAP_SHARED | MAP_NORESERVE | (address ? MAP_FIXED_NOREPLACE : 0), file.descriptor(), 0);
  if (begin == MAP_FAILED) throw failure("the device proxy can't map its shared memory");
  if (address && begin != address) {
    munmap(begin, bytes_);
    errno = EEXIST;
    throw failure("the device proxy can't map its shared memory at the same address in both processes");
  }
  madvise(begin, bytes_, MADV_DONTFORK);
  begin_ = static_cast<std::byte*>(begin);
}

Mapping::~Mapping() { munmap(begin_, bytes_); }

}  // namespace jitckpt::proxy
