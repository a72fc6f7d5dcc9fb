#include "softgpu/aten/launch.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>

#include <array>

#include "softgpu/aten/execute.h"
#include "softgpu/aten/record.h"
#include "softgpu/module.h"

// What nvcc's output calls; declared by CUDA only for nvcc's own use.
extern "C" {
void** __cudaRegisterFatBinary(void* wrapper);
void __cudaRegisterFatBinaryEnd(void** handle);
void __cudaRegisterFunction(void** handle, const char* host_function, char* device_function, const char* name,
                            int thread_limit, void* thread_id, void* block_id, void* block_dim,
                            void* grid_dim, int* warp_size);
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host_function);
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared_bytes, cudaStream_t stream);
}

namespace softgpu::aten {
namespace {

// A record is a kernel's parameter, passed by value, so kernels come in sizes; a longer one is put into
// device memory. Most are short, and each byte is copied on its way, by a device proxy several times.
constexpr std::array<size_t, 9> record_sizes = {256, 384, 512, 768, 1024, 2048, 4096, 8192, 32256};
constexpr std::array<const char*, record_sizes.size()> call_names = {
    "aten_call_256",  "aten_call_384",  "aten_call_512",  "aten_call_768",  "aten_call_1024",
    "aten_call_2048", "aten_call_4096", "aten_call_8192", "aten_call_32256"};

template <class T>
T parameter(void** arguments, size_t index) {
  T value;
  std::memcpy(&value, arguments[index], sizeof value);
  return value;
}

void call(void** arguments, softgpu_launch_t* launch) {
  const auto* record = static_cast<const uint8_t*>(arguments[0]);
  Header header;
  std::memcpy(&header, record, sizeof header);
  execute_call(record, header.bytes, launch);
}

void call_staged(void** arguments, softgpu_launch_t* launch) {
  const auto record = parameter<const void*>(arguments, 0);
  execute_call(static_cast<const uint8_t*>(softgpu_shadow(record)), parameter<uint64_t>(arguments, 1),
               launch);
}

void collect(void** arguments, softgpu_launch_t* launch) {
  collect_result(parameter<uint64_t>(arguments, 0), parameter<uint64_t>(arguments, 1),
                 parameter<uint64_t>(arguments, 2), parameter<uint64_t>(arguments, 3), launch);
}

// A piece of a record that is too long for one parameter. Who watches what kernels are given has to know that
// another one takes it from where it is put to.
struct Piece {
  uint64_t address, bytes;
  std::array<uint8_t, 16384> content;
};

void put_piece(void** arguments, softgpu_launch_t*) {
  const auto* piece = static_cast<const Piece*>(arguments[0]);
  std::memcpy(softgpu_shadow(reinterpret_cast<const void*>(piece->address)), piece->content.data(),
              piece->bytes);
}

void release(void** arguments, softgpu_launch_t*) { release_results(parameter<uint64_t>(arguments, 0)); }

constexpr std::array<softgpu_parameter_t, 4> words = {{{0, 8}, {8, 8}, {16, 8}, {24, 8}}};
constexpr std::array<softgpu_parameter_t, record_sizes.size()> records = [] {
  std::array<softgpu_parameter_t, record_sizes.size()> all{};
  for (size_t i = 0; i < all.size(); ++i) all[i] = {0, record_sizes[i]};
  return all;
}();

constexpr softgpu_parameter_t piece_parameter = {0, sizeof(Piece)};

enum KernelIndex : size_t {
  first_call = 0,
  staged = record_sizes.size(),
  piece,
  collecting,
  releasing,
  kernel_count
};

constexpr std::array<softgpu_kernel_t, kernel_count> kernels = [] {
  std::array<softgpu_kernel_t, kernel_count> all{};
  for (size_t i = 0; i < record_sizes.size(); ++i)
    all[first_call + i] = {call_names[i], call, &records[i], 1};
  all[staged] = {"aten_call_staged", call_staged, words.data(), 2};
  all[piece] = {SOFTGPU_UPLOAD, put_piece, &piece_parameter, 1};
  all[collecting] = {"aten_collect", collect, words.data(), 4};
  all[releasing] = {"aten_release", release, words.data(), 1};
  return all;
}();

// A kernel is known to the host by the address of its stub; only the address matters.
std::array<char, kernel_count> stubs;

void launch(size_t index, void** arguments, cudaStream_t stream) {
  static std::array<cudaKernel_t, kernel_count> found = [] {
    std::array<cudaKernel_t, kernel_count> all{};
    for (size_t i = 0; i < kernel_count; ++i) C10_CUDA_CHECK(__cudaGetKernel(&all[i], &stubs[i]));
    return all;
  }();
  C10_CUDA_CHECK(__cudaLaunchKernel(found[index], dim3(1), dim3(1), arguments, 0, stream));
}

}  // namespace

void register_kernels() {
  static const softgpu_module_t module = {SOFTGPU_MODULE_MAGIC, kernels.data(), kernels.size()};
  static softgpu_fatbin_wrapper_t wrapper = {SOFTGPU_FATBIN_WRAPPER_MAGIC, 1, &module, nullptr};
  void** handle = __cudaRegisterFatBinary(&wrapper);
  for (size_t i = 0; i < kernel_count; ++i) {
    __cudaRegisterFunction(handle, &stubs[i], const_cast<char*>(kernels[i].name), kernels[i].name, -1,
                           nullptr, nullptr, nullptr, nullptr, nullptr);
  }
  __cudaRegisterFatBinaryEnd(handle);
}

size_t record_capacity(size_t bytes) {
  for (size_t size : record_sizes) {
    if (bytes <= size) return size;
  }
  return bytes;
}

void launch_call(c10::ArrayRef<uint8_t> record, c10::cuda::CUDAStream stream) {
  for (size_t i = 0; i < record_sizes.size(); ++i) {
    if (record.size() != record_sizes[i]) continue;
    std::array<void*, 1> arguments = {const_cast<uint8_t*>(record.data())};
    launch(first_call + i, arguments.data(), stream);
    return;
  }
  // Freed when this returns, for work that is enqueued later: the kernel has read it by then.
  const auto memory =
      at::detail::empty_cuda({static_cast<int64_t>(record.size())}, at::kByte, stream.device(), std::nullopt);
  void* device_record = memory.mutable_data_ptr();
  // As parameters, and not by a copy from the host: what the host has here now is not there any more when a
  // graph is launched.
  const auto next = std::make_unique<Piece>();
  for (size_t done = 0; done < record.size(); done += next->bytes) {
    next->address = reinterpret_cast<uint64_t>(device_record) + done;
    next->bytes = std::min(record.size() - done, next->content.size());
    std::memcpy(next->content.data(), record.data() + done, next->bytes);
    std::array<void*, 1> arguments = {next.get()};
    launch(piece, arguments.data(), stream);
  }
  uint64_t bytes = record.size();
  std::array<void*, 2> arguments = {&device_record, &bytes};
  launch(staged, arguments.data(), stream);
}

void launch_collect(uint64_t reply, uint64_t index, void* address, uint64_t bytes,
                    c10::cuda::CUDAStream stream) {
  std::array<void*, 4> arguments = {&reply, &index, &address, &bytes};
  launch(collecting, arguments.data(), stream);
}

void launch_release(uint64_t reply, c10::cuda::CUDAStream stream) {
  std::array<void*, 1> arguments = {&reply};
  launch(releasing, arguments.data(), stream);
}

}  // namespace softgpu::aten
