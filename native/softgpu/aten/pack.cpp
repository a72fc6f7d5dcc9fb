#include "softgpu/aten/pack.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/List.h>
#include <ATen/core/op_registration/adaption.h>
#include <c10/core/DefaultDtype.h>

namespace softgpu::aten {
namespace {

// Finding out which tensors and storages are the same is quadratic, and no operator on long lists cares.
constexpr size_t most_compared = 32;

// Scalars in this range fit any floating type, so that only their presence can matter for checks, not their
// value.
constexpr double harmless = 65504;

class Packer {
 public:
  Packer(const Operator& op, Packed& packed)
      : op_(op), key_(packed.key), values_(packed.values), packed_(packed) {}

  void pack(const Argument& argument, const c10::IValue& value) {
    switch (argument.kind) {
      case ArgumentKind::generator:
        if (value.isGenerator()) packed_.generator = value.toGenerator();
        key_.put(Tag::generator);
        return;
      case ArgumentKind::tensor:
        value.isNone() ? key_.put(Tag::none) : tensor(argument, value.toTensor());
        return;
      case ArgumentKind::number:
      case ArgumentKind::floating:
        number(value, argument.decides_shape || (argument.kind == ArgumentKind::number && checked(value)));
        return;
      default:
        break;
    }
    if (value.isNone()) {
      key_.put(Tag::none);
      return;
    }
    switch (argument.kind) {
      case ArgumentKind::integer:
      case ArgumentKind::boolean:
        number(value, true);
        return;
      case ArgumentKind::string:
        key_.put(Tag::string);
        put_length(value.toStringRef().size());
        key_.append(value.toStringRef().data(), value.toStringRef().size());
        return;
      case ArgumentKind::device:
        key_.put(Tag::device);
        if (!packed_.device && value.toDevice().is_cuda()) packed_.device = value.toDevice();
        return;
      default:
        pack_list(argument, value);
    }
  }

 private:
  void pack_list(const Argument& argument, const c10::IValue& value) {
    switch (argument.kind) {
      case ArgumentKind::tensor_list:
        key_.put(Tag::tensor_list);
        elements(value, [&](const c10::IValue& element) { tensor(argument, element.toTensor()); });
        return;
      case ArgumentKind::optional_tensor_list:
        key_.put(Tag::optional_tensor_list);
        elements(value, [&](const c10::IValue& element) {
          element.isNone() ? key_.put(Tag::undefined_tensor) : tensor(argument, element.toTensor());
        });
        return;
      case ArgumentKind::integer_list:
        key_.put(Tag::integer_list);
        elements(value, [&](const c10::IValue& element) { key_.put(element.toInt()); });
        return;
      case ArgumentKind::floating_list:
        key_.put(Tag::floating_list);
        elements(value, [&](const c10::IValue& element) { key_.put(element.toDouble()); });
        return;
      case ArgumentKind::boolean_list:
        key_.put(Tag::boolean_list);
        elements(value, [&](const c10::IValue& element) { key_.put(element.toBool()); });
        return;
      case ArgumentKind::number_list:
        key_.put(Tag::number_list);
        elements(value, [&](const c10::IValue& element) { number(element, checked(element)); });
        return;
      default:
        TORCH_CHECK_NOT_IMPLEMENTED(false, "softgpu cannot pass the argument '", argument.name,
                                    "' of operator ", op_.name, " to the device");
    }
  }

  void put_length(size_t length) { key_.put(static_cast<uint32_t>(length)); }

  template <class Put>
  void elements(const c10::IValue& list, Put put) {
    put_length(list.toListRef().size());
    for (const c10::IValue& element : list.toListRef()) put(element);
  }

  // Whether the CPU kernel may reject the value, which the host should hear of at once: one that does not fit
  // the tensor's type. Other values change in every step (a learning rate) and must not make the key differ.
  bool checked(const c10::IValue& value) const {
    if (packed_.tensors.empty() || !at::isFloatingType(packed_.tensors[0].scalar_type())) return true;
    if (value.isDouble()) return !(std::abs(value.toDouble()) <= harmless) && std::isfinite(value.toDouble());
    return !value.isInt() || std::abs(static_cast<double>(value.toInt())) > harmless;
  }

  void number(const c10::IValue& value, bool in_key) {
    Writer& to = in_key ? key_ : values_;
    if (value.isNone()) {
      key_.put(Tag::none);
    } else if (value.isDouble()) {
      key_.put(in_key ? Tag::floating : Tag::floating_value);
      to.put(value.toDouble());
    } else if (value.isInt()) {
      key_.put(in_key ? Tag::integer : Tag::integer_value);
      to.put(value.toInt());
    } else if (value.isBool()) {
      key_.put(in_key ? Tag::boolean : Tag::boolean_value);
      to.put(value.toBool());
    } else if (value.isComplexDouble()) {
      key_.put(in_key ? Tag::complex : Tag::complex_value);
      to.put(value.toComplexDouble());
    } else {
      TORCH_CHECK_NOT_IMPLEMENTED(false, "softgpu cannot pass a ", value.tagKind(), " to operator ",
                                  op_.name);
    }
  }

  void tensor(const Argument& argument, const at::Tensor& value) {
    if (!value.defined()) {
      key_.put(Tag::undefined_tensor);
    } else if (value.is_cuda()) {
      device_tensor(argument, value);
    } else {
      value_tensor(argument, value);
    }
  }

  void device_tensor(const Argument& argument, const at::Tensor& value) {
    TORCH_CHECK_NOT_IMPLEMENTED(value.layout() == at::kStrided, "softgpu has no operator ", op_.name,
                                " for a ", value.layout(), " tensor (argument '", argument.name, "')");
    if (!first_tensor_device_) packed_.device.reset();
    first_tensor_device_ = true;
    c10::impl::check_and_update_common_device(packed_.device, value, op_.name.c_str(), argument.name.c_str());
    const size_t count = packed_.tensors.size();
    if (count <= most_compared) {
      for (size_t i = 0; i < count; ++i) {
        if (packed_.tensors[i].is_same(value)) {
          key_.put(Tag::same_tensor);
          put_length(i);
          return;
        }
      }
    }
    uint8_t flags = 0;
    if (value.unsafeGetTensorImpl()->is_wrapped_number()) flags |= wrapped_number;
    if (value.is_conj()) flags |= conjugate;
    if (value.is_neg()) flags |= negative;
    if (argument.out) {
      flags |= resizable;
      packed_.outs.push_back(count);
    }
    key_.put(Tag::tensor);
    shape(value, flags);
    key_.put(static_cast<uint32_t>(storage_index(value)));
    key_.append(value.strides().data(), value.dim() * sizeof(int64_t));
    values_.put(static_cast<int64_t>(value.storage_offset()));
    packed_.tensors.push_back(value);
  }

  size_t storage_index(const at::Tensor& value) {
    c10::StorageImpl* storage = value.storage().unsafeGetStorageImpl();
    if (packed_.tensors.size() <= most_compared) {
      for (size_t i = 0; i < owners_.size(); ++i) {
        if (owners_[i] == storage) return i;
      }
    }
    owners_.push_back(storage);
    packed_.storages.push_back({reinterpret_cast<uint64_t>(storage->data()), storage->nbytes()});
    return owners_.size() - 1;
  }

  void value_tensor(const Argument& argument, const at::Tensor& value) {
    // As in CUDA's own operators: a CPU tensor may stand for a number, and the foreach operators' lists of
    // numbers.
    const bool allowed = value.is_cpu() && !argument.written &&
                         (value.dim() == 0 || argument.name == "scalars" || argument.name == "batch_sizes");
    if (!allowed) {
      std::optional<c10::Device> common = packed_.device ? packed_.device : c10::Device(c10::kCUDA);
      c10::impl::check_and_update_common_device(common, value, op_.name.c_str(), argument.name.c_str());
    }
    const at::Tensor bytes = value.resolve_conj().resolve_neg().contiguous();
    key_.put(Tag::value_tensor);
    shape(value, value.unsafeGetTensorImpl()->is_wrapped_number() ? wrapped_number : 0);
    (value.dim() == 0 ? values_ : key_).append(bytes.const_data_ptr(), bytes.nbytes());
  }

  void shape(const at::Tensor& value, uint8_t flags) {
    key_.put(static_cast<uint8_t>(value.scalar_type()));
    key_.put(flags);
    key_.put(static_cast<uint8_t>(value.dim()));
    key_.append(value.sizes().data(), value.dim() * sizeof(int64_t));
  }

  const Operator& op_;
  Writer& key_;
  Writer& values_;
  Packed& packed_;
  c10::SmallVector<c10::StorageImpl*, 8> owners_;
  bool first_tensor_device_ = false;
};

}  // namespace

Packed pack(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  Packed packed;
  packed.key.put(static_cast<uint8_t>(c10::get_default_dtype_as_scalartype()));
  Packer packer(op, packed);
  for (size_t i = 0; i < arguments.size(); ++i) packer.pack(op.arguments[i], arguments[i]);
  return packed;
}

TensorLayout layout_of(const Operator& op, const at::Tensor& tensor) {
  TensorLayout layout;
  if (!tensor.defined()) return layout;
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, "softgpu has no operator ", op.name,
                              " that returns a ", tensor.layout(), " tensor");
  layout.defined = true;
  layout.dtype = tensor.scalar_type();
  layout.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  layout.strides.assign(tensor.strides().begin(), tensor.strides().end());
  layout.bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size());
  return layout;
}

void put_layout(Writer& to, const TensorLayout& layout) {
  to.put(static_cast<uint8_t>(layout.defined));
  if (!layout.defined) return;
  to.put(static_cast<uint8_t>(layout.dtype));
  to.put(static_cast<uint8_t>(layout.sizes.size()));
  to.append(layout.sizes.data(), layout.sizes.size() * sizeof(int64_t));
  to.append(layout.strides.data(), layout.strides.size() * sizeof(int64_t));
  to.put(static_cast<uint64_t>(layout.bytes));
}

TensorLayout get_layout(Reader& from) {
  TensorLayout layout;
  layout.defined = from.get<uint8_t>() != 0;
  if (!layout.defined) return layout;
  layout.dtype = static_cast<c10::ScalarType>(from.get<uint8_t>());
  const size_t dimensions = from.get<uint8_t>();
  layout.sizes.resize(dimensions);
  layout.strides.resize(dimensions);
  std::memcpy(layout.sizes.data(), from.take(dimensions * sizeof(int64_t)), dimensions * sizeof(int64_t));
  std::memcpy(layout.strides.data(), from.take(dimensions * sizeof(int64_t)), dimensions * sizeof(int64_t));
  layout.bytes = from.get<uint64_t>();
  return layout;
}

}  // namespace softgpu::aten
