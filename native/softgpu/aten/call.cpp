#include "softgpu/aten/call.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>

#include "softgpu/aten/launch.h"
#include "softgpu/aten/pack.h"
#include "softgpu/aten/record.h"
#include "softgpu/aten/rehearse.h"

namespace softgpu::aten {
namespace {

// The CUDA generator's state, which moves on as it would on a GPU.
std::optional<Randomness> take_randomness(const Operator& op, const Packed& packed, c10::Device device) {
  if (!op.random) return std::nullopt;
  at::Generator generator =
      packed.generator ? *packed.generator : at::globalContext().defaultGenerator(device);
  TORCH_CHECK(generator.device().type() == c10::kCUDA,
              "Expected a 'cuda' device type for generator but found '", generator.device().type(), "'");
  constexpr uint64_t numbers_per_call = 4;  // CUDA's offsets are multiples of 4
  std::lock_guard lock(generator.mutex());
  const at::PhiloxCudaState state =
      generator.get<at::CUDAGeneratorImpl>()->philox_cuda_state(numbers_per_call);
  if (!state.captured_) return Randomness{state.seed_.val, state.offset_.val, 0, 0};
  return Randomness{0, state.offset_intragraph_, reinterpret_cast<uint64_t>(state.seed_.ptr),
                    reinterpret_cast<uint64_t>(state.offset_.ptr)};
}

c10::SmallVector<uint8_t, 2048> make_record(const Operator& op, const Packed& packed,
                                            const std::optional<Randomness>& randomness, uint64_t reply,
                                            c10::ArrayRef<at::Tensor> outputs,
                                            c10::ArrayRef<TensorLayout> layouts) {
  Writer layout_bytes;
  c10::SmallVector<uint64_t, 8> addresses;
  for (size_t i = 0; i < outputs.size(); ++i) {
    put_layout(layout_bytes, layouts[i]);
    addresses.push_back(outputs[i].defined() ? reinterpret_cast<uint64_t>(outputs[i].const_data_ptr()) : 0);
  }
  Header header = {.bytes = 0,
                   .operator_index = op.index,
                   .operator_check = op.check,
                   .storages = static_cast<uint32_t>(packed.storages.size()),
                   .outputs = static_cast<uint32_t>(outputs.size()),
                   .key_bytes = static_cast<uint32_t>(packed.key.size()),
                   .value_bytes = static_cast<uint32_t>(packed.values.size()),
                   .layout_bytes = static_cast<uint32_t>(layout_bytes.size()),
                   .random = randomness.has_value(),
                   .reply = reply};
  c10::SmallVector<uint8_t, 2048> record;
  const size_t random_bytes = randomness ? sizeof *randomness : 0;
  const size_t bytes = sizeof header + random_bytes + packed.storages.size() * sizeof(Storage) +
                       addresses.size() * sizeof(uint64_t) + packed.key.size() + packed.values.size() +
                       layout_bytes.size();
  header.bytes = static_cast<uint32_t>(bytes);
  record.resize_for_overwrite(record_capacity(bytes));
  uint8_t* next = record.data();
  const auto append = [&](const void* data, size_t length) {
    if (length != 0) std::memcpy(next, data, length);
    next += length;
  };
  append(&header, sizeof header);
  if (randomness) append(&*randomness, random_bytes);
  append(packed.storages.data(), packed.storages.size() * sizeof(Storage));
  append(addresses.data(), addresses.size() * sizeof(uint64_t));
  append(packed.key.data(), packed.key.size());
  append(packed.values.data(), packed.values.size());
  append(layout_bytes.data(), layout_bytes.size());
  std::fill(next, record.data() + record.size(), 0);  // the same call has the same record
  return record;
}

at::Tensor allocate(const TensorLayout& layout, c10::Device device) {
  if (!layout.defined) return {};
  return at::detail::empty_strided_cuda(layout.sizes, layout.strides, layout.dtype, device);
}

void resize(const at::Tensor& out, const TensorLayout& layout) {
  // First to the length of the memory: strides may leave holes, for which resize_ leaves no room.
  out.resize_({static_cast<int64_t>(layout.bytes / out.element_size())});
  out.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes, layout.strides);
}

// Replaces the arguments by the returns: aliases of arguments, fresh tensors and values in the schema's
// order.
void push_returns(const Operator& op, c10::Stack* stack, c10::ArrayRef<at::Tensor> fresh,
                  c10::ArrayRef<int> list_lengths, c10::ArrayRef<c10::IValue> values) {
  const auto arguments = torch::jit::last(*stack, op.arguments.size());
  c10::SmallVector<c10::IValue, 4> returns;
  for (const Return& result : op.returns) {
    if (result.argument >= 0) {
      returns.push_back(arguments[result.argument]);
    } else if (!result.tensor) {
      returns.push_back(values.front());
      values = values.slice(1);
    } else if (list_lengths.front() < 0) {
      returns.emplace_back(fresh.front());
      fresh = fresh.slice(1);
      list_lengths = list_lengths.slice(1);
    } else {
      returns.emplace_back(c10::List<at::Tensor>(fresh.slice(0, list_lengths.front())));
      fresh = fresh.slice(list_lengths.front());
      list_lengths = list_lengths.slice(1);
    }
  }
  torch::jit::drop(*stack, op.arguments.size());
  for (c10::IValue& result : returns) stack->push_back(std::move(result));
}

[[noreturn]] void rethrow(const Operator& op, const Reply& reply) {
  const std::string text(reinterpret_cast<const char*>(reply.content), reply.bytes);
  const c10::SourceLocation here = {op.name.c_str(), __FILE__, __LINE__};
  switch (reply.status) {
    case Reply::index_error:
      throw c10::IndexError(here, text);
    case Reply::value_error:
      throw c10::ValueError(here, text);
    case Reply::type_error:
      throw c10::TypeError(here, text);
    case Reply::not_implemented:
      throw c10::NotImplementedError(here, text);
    case Reply::linear_algebra:
      throw c10::LinAlgError(here, text);
    default:
      throw c10::Error(here, text);
  }
}

c10::IValue get_value(Reader& from) {
  switch (from.get<Tag>()) {
    case Tag::floating:
      return from.get<double>();
    case Tag::integer:
      return from.get<int64_t>();
    case Tag::boolean:
      return from.get<bool>();
    default:
      return from.get<c10::complex<double>>();
  }
}

// The device side keeps the results of a call until the host has made room for them.
class HeldResults {
 public:
  HeldResults(uint64_t reply, c10::cuda::CUDAStream stream) : reply_(reply), stream_(stream) {}
  ~HeldResults() {
    try {
      launch_release(reply_, stream_);
    } catch (const c10::Error&) {
      // Launches are refused only by a device that has failed for good, which the program's next call
      // reports.
    }
  }
  HeldResults(const HeldResults&) = delete;
  HeldResults& operator=(const HeldResults&) = delete;

  at::Tensor collect(size_t index, const TensorLayout& layout) {
    at::Tensor result = allocate(layout, stream_.device());
    if (layout.bytes != 0) launch_collect(reply_, index, result.mutable_data_ptr(), layout.bytes, stream_);
    return result;
  }

 private:
  uint64_t reply_;
  c10::cuda::CUDAStream stream_;
};

void call_and_wait(Operator& op, c10::Stack* stack, const Packed& packed, c10::cuda::CUDAStream stream) {
  const at::Tensor reply_memory =
      at::detail::empty_cuda({static_cast<int64_t>(sizeof(Reply))}, at::kByte, stream.device(), std::nullopt);
  const auto address = reinterpret_cast<uint64_t>(reply_memory.const_data_ptr());
  launch_call(make_record(op, packed, take_randomness(op, packed, stream.device()), address, {}, {}), stream);
  Reply reply;
  c10::cuda::memcpy_and_sync(&reply, reply_memory.const_data_ptr(), sizeof reply, cudaMemcpyDeviceToHost,
                             stream);
  if (reply.status != Reply::returned) rethrow(op, reply);

  HeldResults held(address, stream);
  Reader content(reply.content, reply.bytes);
  std::vector<c10::IValue> values;
  std::vector<int> list_lengths;
  size_t fresh_count = 0;
  for (const Return& result : op.returns) {
    if (!result.tensor) values.push_back(get_value(content));
  }
  for (const Return& result : op.returns) {
    if (!result.tensor || result.argument >= 0) continue;
    list_lengths.push_back(content.get<int>());
    fresh_count += list_lengths.back() < 0 ? 1 : list_lengths.back();
  }
  std::vector<at::Tensor> fresh;
  for (size_t i = 0; i < fresh_count; ++i) fresh.push_back(held.collect(i, get_layout(content)));
  for (size_t i = 0; i < packed.outs.size(); ++i) {
    const TensorLayout layout = get_layout(content);
    const at::Tensor& out = packed.tensors[packed.outs[i]];
    if (out.sizes() != at::IntArrayRef(layout.sizes)) resize(out, layout);
    out.copy_(held.collect(fresh_count + i, layout));
  }
  push_returns(op, stack, fresh, list_lengths, values);
}

// CUDA's own kernels for lists count what they write to each tensor, as nothing above them does.
void count_writes(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!op.arguments[i].written || op.arguments[i].kind != ArgumentKind::tensor_list) continue;
    for (const at::Tensor& tensor : arguments[i].toTensorVector())
      tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace

void call_operator(Operator& op, c10::Stack* stack) {
  if (op.prepare != nullptr) op.prepare(stack);
  const auto arguments = torch::jit::last(*stack, op.arguments.size());
  Packed packed = pack(op, arguments);
  if (op.name.starts_with("aten::_foreach_")) count_writes(op, arguments);
  const c10::cuda::CUDAGuard guard(packed.device && packed.device->has_index()
                                       ? *packed.device
                                       : c10::Device(c10::kCUDA, c10::cuda::current_device()));
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(guard.current_device().index());
  if (op.waits != nullptr ? op.waits(arguments) : op.synchronous) {
    call_and_wait(op, stack, packed, stream);
    return;
  }
  std::shared_ptr<const ResultLayout> layout = op.layouts.find(packed.key.view());
  if (!layout) {
    layout = rehearse(op, packed);
    op.layouts.insert(packed.key.view(), layout);
  }
  if (layout->synchronous) {
    call_and_wait(op, stack, packed, stream);
    return;
  }
  if (!layout->resizes.empty()) {
    for (const OutResize& change : layout->resizes) resize(packed.tensors[change.tensor], change.layout);
    packed = pack(op, arguments);
  }
  c10::SmallVector<at::Tensor, 4> fresh;
  for (const TensorLayout& output : layout->outputs) fresh.push_back(allocate(output, stream.device()));
  launch_call(
      make_record(op, packed, take_randomness(op, packed, stream.device()), 0, fresh, layout->outputs),
      stream);
  push_returns(op, stack, fresh, layout->list_lengths, {});
}

}  // namespace softgpu::aten
