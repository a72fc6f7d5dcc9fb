#include "softgpu/nccl/operation.h"

namespace softgpu::nccl {
namespace {

struct Type {
  const char* name;
  size_t size;
};
constexpr Type types[] = {{"int8", 1},    {"uint8", 1},    {"int32", 4},      {"uint32", 4},
                          {"int64", 8},   {"uint64", 8},   {"float16", 2},    {"float32", 4},
                          {"float64", 8}, {"bfloat16", 2}, {"float8e4m3", 1}, {"float8e5m2", 1}};
static_assert(std::size(types) == ncclNumTypes);

constexpr const char* calls[] = {"ncclAllReduce", "ncclReduce",   "ncclReduceScatter", "ncclBroadcast",
                                 "ncclAllGather", "ncclAlltoAll", "ncclGather",        "ncclScatter",
                                 "ncclSend",      "ncclRecv"};
constexpr const char* reductions[] = {"sum", "prod", "max", "min", "avg", "pre-multiplied sum"};

}  // namespace

size_t size_of(ncclDataType_t type) { return types[type].size; }
const char* name_of(ncclDataType_t type) { return types[type].name; }

Descriptor describe(const Operation& operation, uint64_t number) {
  return {number,
          operation.count,
          operation.kind,
          static_cast<uint32_t>(operation.type),
          static_cast<uint32_t>(operation.reduction.operation),
          operation.peer};
}

bool match_transfer(const Descriptor& send, const Descriptor& receive) {
  return send.count * types[send.type].size == receive.count * types[receive.type].size;
}

bool match(const Descriptor& ours, const Descriptor& theirs) {
  if (ours.number != theirs.number || ours.kind != theirs.kind) return false;
  if (has_root(ours.kind) && ours.peer != theirs.peer) return false;
  if (!reduces(ours.kind)) return match_transfer(ours, theirs);
  return ours.count == theirs.count && ours.type == theirs.type && ours.reduction == theirs.reduction;
}

std::string to_text(const Descriptor& descriptor) {
  const auto kind = static_cast<uint32_t>(descriptor.kind);
  std::string text = std::string(calls[kind]) + "(count " + std::to_string(descriptor.count) + ", " +
                     types[descriptor.type].name;
  if (reduces(descriptor.kind)) text += std::string(", ") + reductions[descriptor.reduction];
  if (has_root(descriptor.kind)) text += ", root " + std::to_string(descriptor.peer);
  if (descriptor.kind == Kind::send) text += ", to rank " + std::to_string(descriptor.peer);
  if (descriptor.kind == Kind::receive) text += ", from rank " + std::to_string(descriptor.peer);
  return text + ")";
}

}  // namespace softgpu::nccl
