# NVIDIA's headers come with the PyPI wheels that torch depends on, and nvidia-cuda-crt. They are system headers: our warnings are not for them.
if(NOT JITCKPT_SITE_PACKAGES)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_path('purelib'))"
    OUTPUT_VARIABLE JITCKPT_SITE_PACKAGES OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
endif()

file(GLOB cuda_include_candidates ${JITCKPT_SITE_PACKAGES}/nvidia/cu1[0-9]/include)
find_path(CUDA_RUNTIME_INCLUDE cuda_runtime_api.h PATHS ${cuda_include_candidates} ${JITCKPT_SITE_PACKAGES}/nvidia/cuda_runtime/include NO_DEFAULT_PATH)
find_path(CUBLAS_INCLUDE cublasLt.h PATHS ${cuda_include_candidates} ${JITCKPT_SITE_PACKAGES}/nvidia/cublas/include NO_DEFAULT_PATH)
find_path(NCCL_INCLUDE nccl.h PATHS ${JITCKPT_SITE_PACKAGES}/nvidia/nccl/include NO_DEFAULT_PATH)
# crt/ may live in another environment than torch (pip's isolated build), so it may be given.
find_path(CUDA_CRT_INCLUDE crt/host_defines.h PATHS ${JITCKPT_CRT_INCLUDE} ${cuda_include_candidates} NO_DEFAULT_PATH)
foreach(header CUDA_RUNTIME_INCLUDE CUBLAS_INCLUDE NCCL_INCLUDE CUDA_CRT_INCLUDE)
  if(NOT ${header})
    message(FATAL_ERROR "jitckpt needs NVIDIA's CUDA, cuBLAS and NCCL headers (${header}) and found none under ${JITCKPT_SITE_PACKAGES}: install torch's CUDA wheel and nvidia-cuda-crt there.")
  endif()
endforeach()

add_library(nvidia_headers INTERFACE)
target_include_directories(nvidia_headers SYSTEM INTERFACE ${CUDA_RUNTIME_INCLUDE} ${CUBLAS_INCLUDE} ${NCCL_INCLUDE} ${CUDA_CRT_INCLUDE})
# libraries.h, which includes those that calls.toml has calls of.
target_include_directories(nvidia_headers INTERFACE ${CMAKE_SOURCE_DIR}/native/device_api)
# nccl.h includes the narrow floating-point types, uses none of them, and they need libcu++ (nv/target), which torch's
# wheels don't bring: their include guards are set beforehand.
target_compile_definitions(nvidia_headers INTERFACE __CUDA_FP16_H__ __CUDA_BF16_H__ __CUDA_FP8_H__)
# NCCL 2.30 on makes a macro of one of its functions unless its own build has said which system this is.
target_compile_definitions(nvidia_headers INTERFACE NCCL_OS_LINUX)
