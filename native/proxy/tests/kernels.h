// The kernels of a library as a program would have it: both processes load it.
#pragma once
#include <cuda_runtime_api.h>

namespace kernels {
// add(int* to, int amount): *to += amount. mix(int* to, int* from): *to = 3 * *to + *from. hold(int* flag):
// runs until *flag, in pinned memory, is not 0. nap(int microseconds): runs for so long. fail(): an illegal
// address. upload(int* to, int* value): puts the address there. The addresses of their host stubs.
const void* add();
const void* mix();
const void* hold();
const void* nap();
const void* fail();
const void* upload();
const void* unregistered();
}  // namespace kernels
