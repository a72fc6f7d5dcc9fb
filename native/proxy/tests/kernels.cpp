#include "proxy/tests/kernels.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "softgpu/module.h"

extern "C" {
void** __cudaRegisterFatBinary(void* wrapper);
void __cudaRegisterFatBinaryEnd(void** handle);
void __cudaRegisterFunction(void** handle, const char* stub, char* device_stub, const char* name,
                            int thread_limit, uint3* thread, uint3* block, dim3* block_size, dim3* grid_size,
                            int* warp_size);
}

namespace kernels {

namespace {

char add_stub, mix_stub, hold_stub, nap_stub, fail_stub, upload_stub, unregistered_stub;

void run_add(void** arguments, softgpu_launch_t*) {
  *static_cast<int*>(softgpu_shadow(*static_cast<int**>(arguments[0]))) += *static_cast<int*>(arguments[1]);
}

void run_mix(void** arguments, softgpu_launch_t*) {
  unsigned& to = *static_cast<unsigned*>(softgpu_shadow(*static_cast<unsigned**>(arguments[0])));
  to = 3 * to + *static_cast<unsigned*>(softgpu_shadow(*static_cast<unsigned**>(arguments[1])));
}

void run_hold(void** arguments, softgpu_launch_t*) {
  int* const flag = *static_cast<int**>(arguments[0]);
  while (std::atomic_ref(*flag) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void run_nap(void** arguments, softgpu_launch_t*) {
  std::this_thread::sleep_for(std::chrono::microseconds(*static_cast<int*>(arguments[0])));
}

void run_fail(void**, softgpu_launch_t* launch) {
  softgpu_fail(launch, cudaErrorIllegalAddress, "it wrote where nothing is.");
}

void run_upload(void** arguments, softgpu_launch_t*) {
  *static_cast<int**>(softgpu_shadow(*static_cast<int**>(arguments[0]))) = *static_cast<int**>(arguments[1]);
}

constexpr softgpu_parameter_t parameters[] = {{0, sizeof(int*)}, {8, sizeof(int)}};
constexpr softgpu_parameter_t number[] = {{0, sizeof(int)}};
constexpr softgpu_parameter_t pointers[] = {{0, sizeof(int*)}, {8, sizeof(int*)}};
constexpr softgpu_kernel_t code[] = {
    {"add", run_add, parameters, 2},   {"mix", run_mix, pointers, 2},
    {"hold", run_hold, parameters, 1}, {"nap", run_nap, number, 1},
    {"fail", run_fail, nullptr, 0},    {SOFTGPU_UPLOAD, run_upload, pointers, 2}};
constexpr softgpu_module_t module_data{SOFTGPU_MODULE_MAGIC, code, 6};
softgpu_fatbin_wrapper_t wrapper{SOFTGPU_FATBIN_WRAPPER_MAGIC, 1, &module_data, nullptr};

[[maybe_unused]] const bool registered = [] {
  void** module = __cudaRegisterFatBinary(&wrapper);
  const auto enter = [module](const char& stub, const char* name) {
    __cudaRegisterFunction(module, &stub, nullptr, name, -1, nullptr, nullptr, nullptr, nullptr, nullptr);
  };
  enter(add_stub, "add");
  enter(mix_stub, "mix");
  enter(hold_stub, "hold");
  enter(nap_stub, "nap");
  enter(fail_stub, "fail");
  enter(upload_stub, SOFTGPU_UPLOAD);
  __cudaRegisterFatBinaryEnd(module);
  return true;
}();

}  // namespace

const void* add() { return &add_stub; }
const void* mix() { return &mix_stub; }
const void* hold() { return &hold_stub; }
const void* nap() { return &nap_stub; }
const void* fail() { return &fail_stub; }
const void* upload() { return &upload_stub; }
const void* unregistered() { return &unregistered_stub; }

}  // namespace kernels
