// How a call of softgpu's NCCL fails: inside by an exception, outside by NCCL's result code and a sentence
// that ncclGetLastError gives back.
#pragma once
#include <nccl.h>

#include <exception>
#include <sstream>
#include <string>
#include <utility>

namespace softgpu::nccl {

class NcclFailure : public std::exception {
 public:
  template <class... Parts>
  explicit NcclFailure(ncclResult_t code, const Parts&... parts) : code_(code) {
    std::ostringstream text;
    (text << ... << parts);
    text_ = text.str();
  }

  ncclResult_t code() const { return code_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  ncclResult_t code_;
  std::string text_;
};

// The sentence of this thread's last failed call.
std::string& last_error();

// The sentence of the newest failure that came over a communicator on a thread of ours; any thread may ask
// for it.
void set_asynchronous_error(const std::string& text);
std::string asynchronous_error();

// Runs work and turns what it throws into a result code and last_error(). Work returns a result code, since
// ncclInProgress is one too, or nothing.
template <class Work>
ncclResult_t report(Work work) {
  try {
    return work();
  } catch (const NcclFailure& failure) {
    last_error() = failure.what();
    return failure.code();
  } catch (const std::exception& error) {  // out of memory, no more threads
    last_error() = error.what();
    return ncclSystemError;
  }
}

}  // namespace softgpu::nccl
