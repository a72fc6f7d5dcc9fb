// Where DistributedDataParallel adds up gradients: its buckets, which no tensor of the program shows. Each
// backward pass that adds any up writes them before it reads them, so between two of them they hold nothing.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <vector>

#include "proxy/client/jitckpt_proxy.h"

namespace jitckpt::torch_memory {

// Appends the bucket memory of a torch._C._distributed_c10d.Reducer on a device. None where the buckets are
// the gradients themselves.
void append_buckets(PyObject* reducer, std::vector<jitckpt_proxy_place>& places);

}  // namespace jitckpt::torch_memory
