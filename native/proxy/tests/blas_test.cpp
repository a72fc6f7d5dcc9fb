// cuBLAS through the proxy: each call arrives as it was made, and a new server has what the old one had.
#include "proxy/client/blas.h"

#include <dlfcn.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

#include "proxy/client/jitckpt_proxy.h"
#include "proxy/tests/blas_driver.h"
#include "proxy/tests/support.h"

namespace {

using jitckpt::proxy::client::scalar_bytes;

constexpr uint64_t rounds = 20;

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path);
  return (std::ostringstream() << file.rdbuf()).str();
}

std::vector<std::string> lines(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> all;
  for (std::string line; std::getline(stream, line);) all.push_back(line);
  return all;
}

// A folder of this test, and what is written into it.
class Folder {
 public:
  Folder() {
    std::string name = std::filesystem::temp_directory_path() / "blas-XXXXXX";
    path_ = mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::filesystem::path file(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

TEST(Blas, EveryCallArrivesAsItWasMade) {
  for (const int seed : {1, 2, 3}) {
    const Folder folder;
    std::string echoed[2], seen[2];
    for (const bool direct : {true, false}) {
      const std::string name = direct ? "direct" : "proxied";
      const Ended ended = run_alone(
          "Alone.BlasIsDriven",
          {"BLAS_SEED=" + std::to_string(seed), "BLAS_DIRECT=" + std::to_string(direct),
           "BLAS_ECHO=" + folder.file(name).string(), "BLAS_SEEN=" + folder.file(name + "-seen").string()});
      ASSERT_EQ(ended.status, 0) << ended.output;
      echoed[direct] = read(folder.file(name));
      seen[direct] = read(folder.file(name + "-seen"));
    }
    // With those that make, set and end what the others need.
    EXPECT_GE(lines(echoed[1]).size(), rounds * (driver::calls().size() + 15));
    EXPECT_EQ(lines(echoed[0]), lines(echoed[1]));
    EXPECT_EQ(lines(seen[0]), lines(seen[1]));
  }
}

TEST(Alone, BlasIsDriven) {
  if (!alone()) GTEST_SKIP() << "another test starts it";
  const bool direct = std::atoi(std::getenv("BLAS_DIRECT")) != 0;
  void* const library = direct ? dlopen(BLAS_ECHO_LIBRARY, RTLD_NOW | RTLD_LOCAL) : dlopen(nullptr, RTLD_NOW);
  ASSERT_TRUE(library) << dlerror();
  const auto seed = static_cast<uint64_t>(std::atoi(std::getenv("BLAS_SEED")));
  std::ofstream seen(std::getenv("BLAS_SEEN"));
  for (uint64_t round = 0; round < rounds; ++round) {
    driver::Driver driver(library, seed * 1000 + round);
    driver.run();
    seen << driver.seen();
  }
}

TEST(Blas, ANewServerHasHandlesWithTheirSettings) {
  const Folder folder;
  const Ended ended = run_alone("Alone.BlasOutlivesItsServer", {"BLAS_ECHO=" + folder.file("echo").string()});
  ASSERT_EQ(ended.status, 0) << ended.output;
  auto all = lines(read(folder.file("echo")));
  const std::vector<std::string> create{"cublasCreate_v2", "cublasCreate_v2"};
  const auto second = std::find_end(all.begin(), all.end(), create.begin(), create.end());
  ASSERT_NE(second, all.end());
  // The numbers of the new server's things begin at 1 again. What was ended or set anew before the minibatch
  // is not there; what is made again is only what belongs to it.
  const std::vector<std::string> expected{
      "cublasCreate_v2",
      "cublasCreate_v2",
      "cublasSetStream_v2 #2 stream",
      "cublasSetPointerMode_v2 #2 01000000",
      "cublasLtMatmulDescCreate 44000000 00000000",
      "cublasLtMatmulDescSetAttribute #3 07000000 02000000",
      "cublasSetMathMode #2 03000000",
      "cublasSgemv_v2 #2 00000000 02000000 03000000 1000000000000000 2000000000000000 02000000 "
      "3000000000000000 01000000 4000000000000000 5000000000000000 01000000",
      "cublasGetMathMode #2",
  };
  EXPECT_EQ(std::vector<std::string>(second, all.end()), expected);
}

TEST(Alone, BlasOutlivesItsServer) {
  if (!alone()) GTEST_SKIP() << "another test starts it";
  const auto done = [](cublasStatus_t status) { ASSERT_EQ(status, CUBLAS_STATUS_SUCCESS); };
  const auto at = [](uint64_t address) { return reinterpret_cast<float*>(address); };
  const OwnStream stream;
  cublasHandle_t idle = nullptr, handle = nullptr, ended = nullptr;
  done(cublasCreate_v2(&idle));
  done(cublasCreate_v2(&handle));
  done(cublasCreate_v2(&ended));
  done(cublasSetMathMode(ended, CUBLAS_TF32_TENSOR_OP_MATH));
  done(cublasDestroy_v2(ended));
  cudaStream_t short_lived = nullptr;
  ok(cudaStreamCreateWithFlags(&short_lived, cudaStreamNonBlocking));
  done(cublasSetStream_v2(idle, short_lived));
  ok(cudaStreamDestroy(short_lived));
  done(cublasSetMathMode(handle, CUBLAS_DEFAULT_MATH));
  done(cublasSetStream_v2(handle, stream));
  done(cublasSetPointerMode_v2(handle, CUBLAS_POINTER_MODE_DEVICE));
  cublasLtMatmulDesc_t description = nullptr;
  done(cublasLtMatmulDescCreate(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  for (const int epilogue : {1, 2})
    done(cublasLtMatmulDescSetAttribute(description, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                        sizeof epilogue));
  done(cublasSetMathMode(handle, CUBLAS_TF32_TENSOR_OP_MATH));
  ok(static_cast<cudaError_t>(jitckpt_proxy_keep()));
  done(cublasSgemv_v2(handle, CUBLAS_OP_N, 2, 3, at(0x10), at(0x20), 2, at(0x30), 1, at(0x40), at(0x50), 1));
  ok(cudaDeviceSynchronize());
  ASSERT_EQ(kill(jitckpt_proxy_server(), SIGKILL), 0);
  cublasMath_t mode{};
  done(cublasGetMathMode(handle, &mode));
  ok(cudaDeviceSynchronize());
}

TEST(Blas, AHandleThatThereIsNotIsNamed) {
  cublasMath_t mode{};
  EXPECT_EQ(cublasGetMathMode(nullptr, &mode), CUBLAS_STATUS_NOT_INITIALIZED);
  EXPECT_EQ(cublasCreate_v2(nullptr), CUBLAS_STATUS_INVALID_VALUE);
}

TEST(Blas, WhatHasNoRowIsRefused) {
  cublasHandle_t handle = nullptr;
  ASSERT_EQ(cublasCreate_v2(&handle), CUBLAS_STATUS_SUCCESS);
  int version = 0;
  testing::internal::CaptureStderr();
  EXPECT_EQ(cublasGetVersion_v2(handle, &version), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("cublasGetVersion_v2"), std::string::npos);
  EXPECT_EQ(cublasDestroy_v2(handle), CUBLAS_STATUS_SUCCESS);
}

TEST(Blas, FactorsAreAsLongAsTheReferenceSays) {
  // cuBLAS reference, cublasGemmEx: compute type, scale type and C's types.
  EXPECT_EQ(scalar_bytes(CUBLAS_COMPUTE_16F, CUDA_R_16F), 2u);
  EXPECT_EQ(scalar_bytes(CUBLAS_COMPUTE_32I, CUDA_R_32I), 4u);
  EXPECT_EQ(scalar_bytes(CUBLAS_COMPUTE_32F, CUDA_R_16BF), 4u);
  EXPECT_EQ(scalar_bytes(CUBLAS_COMPUTE_32F, CUDA_R_32F), 4u);
  EXPECT_EQ(scalar_bytes(CUBLAS_COMPUTE_32F, CUDA_C_32F), 8u);
  EXPECT_EQ(scalar_bytes(CUBLAS_COMPUTE_32F_FAST_TF32, CUDA_R_32F), 4u);
  EXPECT_EQ(scalar_bytes(CUBLAS_COMPUTE_32F_FAST_TF32, CUDA_C_32F), 8u);
  EXPECT_EQ(scalar_bytes(CUBLAS_COMPUTE_64F, CUDA_R_64F), 8u);
  EXPECT_EQ(scalar_bytes(CUBLAS_COMPUTE_64F, CUDA_C_64F), 16u);
}

}  // namespace
