#include "softgpu/aten/execute.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <string>
#include <unordered_map>

#include "softgpu/aten/cpu_kernel.h"
#include "softgpu/aten/output_memory.h"
#include "softgpu/aten/pack.h"
#include "softgpu/aten/record.h"
#include "softgpu/aten/unpack.h"

namespace softgpu::aten {
namespace {

void* shadow(uint64_t address) { return softgpu_shadow(reinterpret_cast<const void*>(address)); }

class DeviceArgumentMemory final : public ArgumentMemory {
 public:
  void* address(const Storage& storage) override {
    return storage.address == 0 ? nullptr : shadow(storage.address);
  }
};

// A record's parts.
struct Call {
  Header header;
  Randomness randomness;
  Operator* op;
  c10::SmallVector<Storage, 8> storages;
  c10::SmallVector<uint64_t, 4> output_addresses;
  Reader key, values, layouts;
};

Call parse(const uint8_t* record, size_t bytes) {
  Reader reader(record, bytes);
  const auto header = reader.get<Header>();
  auto& operators = all_operators();
  TORCH_CHECK(header.operator_index < operators.size() &&
                  operators[header.operator_index]->check == header.operator_check,
              "operator number ", header.operator_index, " was packed by a process with another torch");
  const Randomness randomness = header.random ? reader.get<Randomness>() : Randomness{};
  c10::SmallVector<Storage, 8> storages(header.storages);
  std::memcpy(storages.data(), reader.take(header.storages * sizeof(Storage)),
              header.storages * sizeof(Storage));
  c10::SmallVector<uint64_t, 4> outputs(header.outputs);
  std::memcpy(outputs.data(), reader.take(header.outputs * sizeof(uint64_t)),
              header.outputs * sizeof(uint64_t));
  const uint8_t* key = reader.take(header.key_bytes);
  const uint8_t* values = reader.take(header.value_bytes);
  const uint8_t* layouts = reader.take(header.layout_bytes);
  return {.header = header,
          .randomness = randomness,
          .op = operators[header.operator_index],
          .storages = std::move(storages),
          .output_addresses = std::move(outputs),
          .key = Reader(key, header.key_bytes),
          .values = Reader(values, header.value_bytes),
          .layouts = Reader(layouts, header.layout_bytes)};
}

uint64_t mixed(uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

uint64_t read_word(uint64_t address) {
  uint64_t word;
  std::memcpy(&word, shadow(address), sizeof word);
  return word;
}

uint64_t seed_of(const Randomness& from) {
  const uint64_t seed = from.seed_address == 0 ? from.seed : read_word(from.seed_address);
  const uint64_t offset = from.offset + (from.offset_address == 0 ? 0 : read_word(from.offset_address));
  return mixed(seed ^ mixed(offset));
}

Unpacked unpack_call(const Call& call) {
  DeviceArgumentMemory memory;
  return unpack(call.key, call.values, call.storages, memory,
                call.op->random ? seeded_generator(seed_of(call.randomness)) : at::Generator(),
                call.header.reply != 0);
}

// The CPU kernel has decided where its results lie; brings them to where the host expects them.
void deliver(const Call& call, std::vector<at::Tensor> results, c10::ArrayRef<TensorLayout> layouts,
             c10::ArrayRef<OutputBlock> blocks) {
  std::unordered_map<const void*, size_t> places;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].taken) places.emplace(blocks[i].address, i);
  }
  for (size_t i = 0; i < results.size(); ++i) {  // a result in another's place would be overwritten below
    if (!results[i].defined()) continue;
    results[i] = results[i].resolve_conj().resolve_neg();  // a layout has neither flag
    const auto place = places.find(results[i].storage().data());
    if (place != places.end() && place->second != i) results[i] = results[i].clone();
  }
  for (size_t i = 0; i < results.size(); ++i) {
    const at::Tensor& result = results[i];
    const TensorLayout actual = layout_of(*call.op, result);
    TORCH_CHECK(actual.defined == layouts[i].defined && actual.dtype == layouts[i].dtype &&
                    actual.sizes == layouts[i].sizes,
                "softgpu expected ", call.op->name, " to return ", at::IntArrayRef(layouts[i].sizes), " of ",
                layouts[i].dtype, " as its result number ", i, ", but it returned ",
                at::IntArrayRef(actual.sizes), " of ", actual.dtype);
    if (!actual.defined || actual.bytes == 0 || result.const_data_ptr() == blocks[i].address) continue;
    if (actual.strides == layouts[i].strides) {
      std::memcpy(blocks[i].address, result.const_data_ptr(), actual.bytes);
    } else {
      auto storage = c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(layouts[i].bytes),
          c10::DataPtr(blocks[i].address, c10::kCPU), nullptr, false);
      auto target = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                             c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                             c10::scalarTypeToTypeMeta(actual.dtype));
      target.unsafeGetTensorImpl()->set_sizes_and_strides(layouts[i].sizes, layouts[i].strides);
      target.copy_(result);
    }
  }
}

void run_for_later(Call& call) {
  Unpacked unpacked = unpack_call(call);
  c10::SmallVector<TensorLayout, 4> layouts;
  c10::SmallVector<OutputBlock, 4> blocks;
  for (uint64_t address : call.output_addresses) {
    layouts.push_back(get_layout(call.layouts));
    const bool usable = layouts.back().defined && layouts.back().bytes != 0;
    blocks.push_back(
        {.address = usable ? shadow(address) : nullptr, .bytes = layouts.back().bytes, .taken = !usable});
  }
  {
    OutputMemory memory(blocks);
    run_cpu_kernel(*call.op, unpacked.stack);
  }
  std::vector<int> list_lengths;
  deliver(call, fresh_results(*call.op, unpacked.stack, list_lengths), layouts, blocks);
}

// Results that wait for the host to make room for them, by the address of the reply that announced them.
// Never freed: streams may still run operators while the process ends.
struct Held {
  std::mutex mutex;
  std::unordered_map<uint64_t, std::vector<at::Tensor>> results;
};

Held& held() {
  static auto* all = new Held;
  return *all;
}

void put_value(Writer& to, const c10::IValue& value) {
  if (value.isDouble()) {
    to.put(Tag::floating);
    to.put(value.toDouble());
  } else if (value.isInt()) {
    to.put(Tag::integer);
    to.put(value.toInt());
  } else if (value.isBool()) {
    to.put(Tag::boolean);
    to.put(value.toBool());
  } else if (value.isComplexDouble()) {
    to.put(Tag::complex);
    to.put(value.toComplexDouble());
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "softgpu cannot return a ", value.tagKind(), " from an operator");
  }
}

Writer run_and_hold(const Call& call) {
  Unpacked unpacked = unpack_call(call);
  run_cpu_kernel(*call.op, unpacked.stack);
  Writer content;
  std::vector<int> list_lengths;
  std::vector<at::Tensor> results = fresh_results(*call.op, unpacked.stack, list_lengths);
  for (size_t i = 0; i < call.op->returns.size(); ++i) {
    if (!call.op->returns[i].tensor) put_value(content, unpacked.stack[i]);
  }
  for (int length : list_lengths) content.put(length);
  results.insert(results.end(), unpacked.outs.begin(), unpacked.outs.end());
  for (at::Tensor& result : results) {
    if (result.defined()) result = result.resolve_conj().resolve_neg();
    put_layout(content, layout_of(*call.op, result));
  }
  TORCH_CHECK(content.size() <= sizeof(Reply::content), "operator ", call.op->name, " returned ",
              results.size(), " tensors, more than softgpu can report");
  std::lock_guard lock(held().mutex);
  held().results.insert_or_assign(call.header.reply, std::move(results));
  return content;
}

std::pair<Reply::Status, std::string> describe(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text = torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
  if (dynamic_cast<const c10::IndexError*>(&error) != nullptr) return {Reply::index_error, text};
  if (dynamic_cast<const c10::ValueError*>(&error) != nullptr) return {Reply::value_error, text};
  if (dynamic_cast<const c10::TypeError*>(&error) != nullptr) return {Reply::type_error, text};
  if (dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr) return {Reply::not_implemented, text};
  if (dynamic_cast<const c10::LinAlgError*>(&error) != nullptr) return {Reply::linear_algebra, text};
  return {Reply::other, text};
}

void answer(uint64_t address, Reply::Status status, const void* content, size_t bytes) {
  auto* reply = static_cast<Reply*>(shadow(address));
  reply->status = status;
  reply->bytes = static_cast<uint32_t>(std::min(bytes, sizeof(Reply::content)));
  std::memcpy(reply->content, content, reply->bytes);
}

}  // namespace

void execute_call(const uint8_t* record, size_t bytes, softgpu_launch_t* launch) {
  std::string name = "an operator";
  uint64_t reply = 0;
  try {
    Call call = parse(record, bytes);
    name = call.op->name;
    reply = call.header.reply;
    if (reply == 0) {
      run_for_later(call);
    } else {
      const Writer content = run_and_hold(call);
      answer(reply, Reply::returned, content.data(), content.size());
    }
  } catch (const std::exception& error) {
    const auto [status, text] = describe(error);
    if (reply == 0) {
      softgpu_fail(launch, cudaErrorAssert, (name + " failed on the device: " + text).c_str());
    } else {
      answer(reply, status, text.data(), text.size());
    }
  }
}

void collect_result(uint64_t reply, size_t index, uint64_t address, size_t bytes, softgpu_launch_t* launch) {
  std::lock_guard lock(held().mutex);
  const auto found = held().results.find(reply);
  if (found == held().results.end() || index >= found->second.size()) {
    softgpu_fail(launch, cudaErrorAssert, "softgpu was asked for an operator's result that it does not hold");
    return;
  }
  if (bytes != 0) std::memcpy(shadow(address), found->second[index].const_data_ptr(), bytes);
}

void release_results(uint64_t reply) {
  std::lock_guard lock(held().mutex);
  held().results.erase(reply);
}

}  // namespace softgpu::aten
