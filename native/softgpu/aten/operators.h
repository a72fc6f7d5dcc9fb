// ATen's operators as softgpu sees them: what of a call its schema alone decides.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <string>
#include <vector>

#include "softgpu/aten/layout_cache.h"

namespace softgpu::aten {

struct Operator;

// Changes the arguments on the stack before the call is packed, where CUDA accepts what the CPU kernel does
// not.
using Prepare = void (*)(c10::Stack*);

// Whether the host must wait for this very call's results, where that depends on the arguments.
using Waits = bool (*)(c10::ArrayRef<c10::IValue>);

enum class ArgumentKind : uint8_t {
  tensor,
  tensor_list,
  optional_tensor_list,
  integer,
  integer_list,
  floating,
  floating_list,
  boolean,
  boolean_list,
  number,
  number_list,
  string,
  device,
  generator,
  unsupported,
};

struct Argument {
  std::string name;
  ArgumentKind kind;
  bool written;        // Tensor(a!)
  bool out;            // written and keyword only: an out= argument, which the operator may resize
  bool decides_shape;  // a number or float whose value the shape of the results depends on
};

struct Return {
  int argument;  // the argument that it is an alias of, -1 for a fresh value
  bool tensor;   // a tensor or a list of tensors
};

struct Operator {
  c10::OperatorHandle handle;
  std::string name;  // aten::add.Tensor
  uint32_t index;    // in the sorted list of all operators: the same in every process with this torch
  uint32_t check;    // a hash of the name, so that another torch is noticed
  std::vector<Argument> arguments;
  std::vector<Return> returns;
  bool synchronous = false;  // the results' shapes or values are needed by the host
  bool rehearsable = true;   // false where made-up inputs would make the CPU kernel fail or go astray
  bool random = false;
  bool view = false;  // returns an alias that it does not write
  Prepare prepare = nullptr;
  Waits waits = nullptr;  // in place of `synchronous`
  LayoutCache layouts;

  explicit Operator(c10::OperatorHandle operator_handle) : handle(operator_handle) {}
};

// All ATen operators of this torch, and softgpu's own, sorted by name; made at the first call.
std::vector<Operator*>& all_operators();

// Null if this torch has no such operator; name as in aten::add.Tensor.
Operator* find_operator(const std::string& name);

}  // namespace softgpu::aten
