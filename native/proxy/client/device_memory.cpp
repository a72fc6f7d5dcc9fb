// cudaMalloc, whose address is part of what the program knows: it is put into the call's record.
#include "proxy/client/jitckpt_proxy.h"
#include "proxy/client/objects.h"
#include "proxy_by_hand.h"

using namespace jitckpt::proxy;
using namespace jitckpt::proxy::client;

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  if (!pointer) return no_place<cudaError_t>();
  wire::allocate arguments{0, bytes};
  wire::allocate_answer answer;
  const auto result = ask<cudaError_t>(Call::allocate, arguments, answer, {}, Question::allocates);
  if (result != cudaSuccess) return result;
  *pointer = reinterpret_cast<void*>(answer.address);
  if (bytes == 0) return cudaSuccess;
  // Until who has asked for it says otherwise.
  jitckpt_proxy_hold(answer.address, bytes);
  arguments.address = answer.address;
  note_object(answer.address, Call::allocate, bytes_of(arguments));
  return cudaSuccess;
}
