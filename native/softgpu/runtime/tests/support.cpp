#include "softgpu/runtime/tests/support.h"

#include <cstdlib>
#include <memory>
#include <thread>

void expect_success(cudaError_t error, const char* file, int line) {
  if (error == cudaSuccess) return;
  ADD_FAILURE_AT(file, line) << cudaGetErrorName(error) << ": " << cudaGetErrorString(error);
}

void Gate::close(cudaStream_t stream) {
  {
    std::lock_guard lock(mutex_);
    ++to_pass_;
  }
  ok(cudaLaunchHostFunc(stream, &Gate::wait, this));
}

void Gate::wait_for_streams() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return waiting_ == to_pass_; });
}

void Gate::open() {
  std::unique_lock lock(mutex_);
  open_ = true;
  changed_.notify_all();
  changed_.wait(lock, [this] { return to_pass_ == 0; });
}

void Gate::wait(void* argument) {
  Gate& gate = *static_cast<Gate*>(argument);
  std::unique_lock lock(gate.mutex_);
  ++gate.waiting_;
  gate.changed_.notify_all();
  gate.changed_.wait(lock, [&gate] { return gate.open_; });
  --gate.to_pass_;
  --gate.waiting_;
  gate.changed_.notify_all();
}

std::vector<int> DeviceInts::read() const {
  std::vector<int> values(count_);
  ok(cudaMemcpy(values.data(), begin_, count_ * sizeof(int), cudaMemcpyDeviceToHost));
  return values;
}

void DeviceInts::write(const std::vector<int>& values) const {
  ok(cudaMemcpy(begin_, values.data(), values.size() * sizeof(int), cudaMemcpyHostToDevice));
}

void Diary::note(cudaStream_t stream, int number) {
  const auto write = [](void* argument) {
    const std::unique_ptr<Entry> entry(static_cast<Entry*>(argument));
    std::lock_guard lock(entry->diary->mutex_);
    entry->diary->numbers_.push_back(entry->number);
  };
  auto entry = std::make_unique<Entry>(Entry{this, number});
  ok(cudaLaunchHostFunc(stream, write, entry.get()));
  static_cast<void>(entry.release());
}

std::vector<int> Diary::read() {
  std::lock_guard lock(mutex_);
  return numbers_;
}

namespace kernels {

char add, nap, fail, missing, nvidia;

namespace {

void run_add(void** arguments, softgpu_launch_t*) {
  int* const to = static_cast<int*>(softgpu_shadow(*static_cast<int**>(arguments[0])));
  *to += *static_cast<int*>(arguments[1]);
}

void run_nap(void** arguments, softgpu_launch_t* launch) {
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  run_add(arguments, launch);
}

void run_fail(void**, softgpu_launch_t* launch) {
  softgpu_fail(launch, cudaErrorIllegalAddress, "it wrote where nothing is.");
}

constexpr softgpu_parameter_t add_parameters[] = {{0, sizeof(int*)}, {8, sizeof(int)}};
constexpr softgpu_kernel_t code[] = {
    {"add", run_add, add_parameters, 2}, {"nap", run_nap, add_parameters, 2}, {"fail", run_fail, nullptr, 0}};
constexpr softgpu_module_t module_data{SOFTGPU_MODULE_MAGIC, code, 3};
softgpu_fatbin_wrapper_t wrapper{SOFTGPU_FATBIN_WRAPPER_MAGIC, 1, &module_data, nullptr};

const unsigned long long nvidia_data[2] = {0x1234, 0x5678};
softgpu_fatbin_wrapper_t nvidia_wrapper{SOFTGPU_FATBIN_WRAPPER_MAGIC, 1, nvidia_data, nullptr};

}  // namespace

void register_all() {
  const auto add_kernel = [](void** module, const char& stub, const char* name) {
    __cudaRegisterFunction(module, &stub, nullptr, name, -1, nullptr, nullptr, nullptr, nullptr, nullptr);
  };
  void** module = __cudaRegisterFatBinary(&wrapper);
  add_kernel(module, add, "add");
  add_kernel(module, nap, "nap");
  add_kernel(module, fail, "fail");
  __cudaRegisterFatBinaryEnd(module);
  void** other = __cudaRegisterFatBinary(&nvidia_wrapper);
  add_kernel(other, nvidia, "_ZN2at6native4fillEPfi");
  __cudaRegisterFatBinaryEnd(other);
}

}  // namespace kernels

// A small machine, the same in every test; in place before the first call to the runtime, also in re-executed
// tests.
int main(int argc, char** argv) {
  setenv("SOFTGPU_DEVICES", "2", 1);
  setenv("SOFTGPU_MEMORY", "67108864", 1);
  unsetenv("CUDA_VISIBLE_DEVICES");
  kernels::register_all();
  testing::InitGoogleTest(&argc, argv);
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a test that ends its process gets a fresh one
  return RUN_ALL_TESTS();
}
