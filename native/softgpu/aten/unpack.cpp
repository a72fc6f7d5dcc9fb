#include "softgpu/aten/unpack.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/List.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>

namespace softgpu::aten {
namespace {

class Unpacker {
 public:
  Unpacker(Reader key, Reader values, c10::ArrayRef<Storage> storages, ArgumentMemory& memory,
           const at::Generator& generator, bool out_is_fresh, Unpacked& unpacked)
      : key_(key),
        values_(values),
        places_(storages),
        memory_(memory),
        generator_(generator),
        out_is_fresh_(out_is_fresh),
        unpacked_(unpacked) {
    storages_.resize(storages.size());
    key_.get<uint8_t>();  // the default dtype, which only the shapes depend on
  }

  void unpack() {
    while (!key_.at_end()) unpacked_.stack.push_back(value());
  }

 private:
  c10::IValue value() {
    const Tag tag = key_.get<Tag>();
    switch (tag) {
      case Tag::none:
        return {};
      case Tag::tensor:
      case Tag::same_tensor:
      case Tag::undefined_tensor:
      case Tag::value_tensor:
        return tensor(tag);
      case Tag::integer:
        return key_.get<int64_t>();
      case Tag::floating:
        return key_.get<double>();
      case Tag::boolean:
        return key_.get<bool>();
      case Tag::complex:
        return key_.get<c10::complex<double>>();
      case Tag::integer_value:
        return values_.get<int64_t>();
      case Tag::floating_value:
        return values_.get<double>();
      case Tag::boolean_value:
        return values_.get<bool>();
      case Tag::complex_value:
        return values_.get<c10::complex<double>>();
      case Tag::string: {
        const size_t length = key_.get<uint32_t>();
        return std::string(reinterpret_cast<const char*>(key_.take(length)), length);
      }
      case Tag::device:
        return c10::Device(c10::kCPU);
      case Tag::generator:
        return generator_;
      case Tag::tensor_list:
        return list<at::Tensor>([&] { return tensor(key_.get<Tag>()); });
      case Tag::optional_tensor_list:
        return list<std::optional<at::Tensor>>([&]() -> std::optional<at::Tensor> {
          at::Tensor element = tensor(key_.get<Tag>());
          return element.defined() ? std::optional(element) : std::nullopt;
        });
      case Tag::integer_list:
        return list<int64_t>([&] { return key_.get<int64_t>(); });
      case Tag::floating_list:
        return list<double>([&] { return key_.get<double>(); });
      case Tag::boolean_list:
        return list<bool>([&] { return key_.get<bool>(); });
      case Tag::number_list:
        return list<at::Scalar>([&] { return value().toScalar(); });
    }
    throw std::runtime_error("an operator record has a value of an unknown kind");
  }

  template <class T, class Get>
  c10::IValue list(Get get) {
    const size_t length = key_.get<uint32_t>();
    c10::List<T> list;
    list.reserve(length);
    for (size_t i = 0; i < length; ++i) list.push_back(get());
    return list;
  }

  at::Tensor tensor(Tag tag) {
    switch (tag) {
      case Tag::undefined_tensor:
        return {};
      case Tag::same_tensor:
        return unpacked_.tensors[key_.get<uint32_t>()];
      default:
        break;
    }
    const auto dtype = static_cast<c10::ScalarType>(key_.get<uint8_t>());
    const uint8_t flags = key_.get<uint8_t>();
    const size_t dimensions = key_.get<uint8_t>();
    const at::IntArrayRef sizes = integers(sizes_, dimensions);
    at::Tensor result;
    if (tag == Tag::value_tensor) {
      result = at::detail::empty_cpu(sizes, dtype);
      Reader& from = dimensions == 0 ? values_ : key_;
      std::memcpy(result.mutable_data_ptr(), from.take(result.nbytes()), result.nbytes());
    } else {
      const size_t storage = key_.get<uint32_t>();
      const at::IntArrayRef strides = integers(strides_, dimensions);
      const int64_t offset = values_.get<int64_t>();
      if ((flags & resizable) && out_is_fresh_) {
        result = at::detail::empty_strided_cpu(sizes, strides, dtype);
      } else {
        result = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage_at(storage)),
                                                          c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                          c10::scalarTypeToTypeMeta(dtype));
        result.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
      }
      if (flags & conjugate) result._set_conj(true);
      if (flags & negative) result._set_neg(true);
      unpacked_.tensors.push_back(result);
      if (flags & resizable) unpacked_.outs.push_back(result);
    }
    if (flags & wrapped_number) result.unsafeGetTensorImpl()->set_wrapped_number(true);
    return result;
  }

  at::IntArrayRef integers(c10::SmallVector<int64_t, 8>& to, size_t count) {
    to.resize(count);
    std::memcpy(to.data(), key_.take(count * sizeof(int64_t)), count * sizeof(int64_t));
    return to;
  }

  const c10::Storage& storage_at(size_t index) {
    c10::Storage& storage = storages_[index];
    if (!storage) {
      const Storage& place = places_[index];
      storage = c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(place.bytes),
          c10::DataPtr(memory_.address(place), c10::kCPU), nullptr, false);
    }
    return storage;
  }

  Reader key_, values_;
  c10::ArrayRef<Storage> places_;
  c10::SmallVector<c10::Storage, 8> storages_;
  ArgumentMemory& memory_;
  const at::Generator& generator_;
  bool out_is_fresh_;
  c10::SmallVector<int64_t, 8> sizes_, strides_;
  Unpacked& unpacked_;
};

}  // namespace

Unpacked unpack(Reader key, Reader values, c10::ArrayRef<Storage> storages, ArgumentMemory& memory,
                const at::Generator& generator, bool out_is_fresh) {
  Unpacked unpacked;
  unpacked.stack.reserve(8);
  Unpacker(key, values, storages, memory, generator, out_is_fresh, unpacked).unpack();
  return unpacked;
}

}  // namespace softgpu::aten
