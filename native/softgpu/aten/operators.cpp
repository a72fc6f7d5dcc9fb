#include "softgpu/aten/operators.h"

#include <algorithm>
#include <array>
#include <span>

namespace softgpu::aten {
namespace {

// Constants of the compiler, because the library's loading needs them before its other statics are there.
//
// The CPU kernels of these read pivots as indices without checking them, or fail on any data but the right
// one: they must never see made-up inputs.
constexpr std::array<std::string_view, 10> not_rehearsable = {"aten::_assert_async",
                                                              "aten::_assert_async.msg",
                                                              "aten::_embedding_bag_backward",
                                                              "aten::_embedding_bag_dense_backward",
                                                              "aten::linalg_ldl_solve",
                                                              "aten::linalg_ldl_solve.out",
                                                              "aten::linalg_lu_solve",
                                                              "aten::linalg_lu_solve.out",
                                                              "aten::lu_unpack",
                                                              "aten::lu_unpack.out"};

// The shapes of their results depend on data, though torch does not tag them so.
constexpr std::array<std::string_view, 2> shaped_by_data = {"aten::_padded_dense_to_jagged_forward",
                                                            "aten::_unique"};

bool is_one_of(std::string_view name, std::span<const std::string_view> names) {
  return std::ranges::find(names, name) != names.end();
}

uint32_t hash_name(const std::string& name) {  // FNV-1a
  uint32_t hash = 2166136261u;
  for (unsigned char byte : name) hash = (hash ^ byte) * 16777619u;
  return hash;
}

ArgumentKind kind_of(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::OptionalType:
      return kind_of(*type.castRaw<c10::OptionalType>()->getElementType());
    case c10::TypeKind::TensorType:
      return ArgumentKind::tensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return ArgumentKind::integer;
    case c10::TypeKind::FloatType:
    case c10::TypeKind::SymFloatType:
      return ArgumentKind::floating;
    case c10::TypeKind::BoolType:
    case c10::TypeKind::SymBoolType:
      return ArgumentKind::boolean;
    case c10::TypeKind::NumberType:
      return ArgumentKind::number;
    case c10::TypeKind::StringType:
      return ArgumentKind::string;
    case c10::TypeKind::DeviceObjType:
      return ArgumentKind::device;
    case c10::TypeKind::GeneratorType:
      return ArgumentKind::generator;
    case c10::TypeKind::ListType: {
      const c10::Type& element = *type.castRaw<c10::ListType>()->getElementType();
      switch (kind_of(element)) {
        case ArgumentKind::tensor:
          return element.kind() == c10::TypeKind::OptionalType ? ArgumentKind::optional_tensor_list
                                                               : ArgumentKind::tensor_list;
        case ArgumentKind::integer:
          return ArgumentKind::integer_list;
        case ArgumentKind::floating:
          return ArgumentKind::floating_list;
        case ArgumentKind::boolean:
          return ArgumentKind::boolean_list;
        case ArgumentKind::number:
          return ArgumentKind::number_list;
        default:
          return ArgumentKind::unsupported;
      }
    }
    default:
      return ArgumentKind::unsupported;
  }
}

bool is_tensor(ArgumentKind kind) {
  return kind == ArgumentKind::tensor || kind == ArgumentKind::tensor_list ||
         kind == ArgumentKind::optional_tensor_list;
}

bool starts_with(const std::string& text, std::string_view prefix) {
  return std::string_view(text).starts_with(prefix);
}

void classify(Operator& op) {
  const c10::FunctionSchema& schema = op.handle.schema();
  const bool range = starts_with(op.name, "aten::arange") || starts_with(op.name, "aten::range");
  for (const c10::Argument& argument : schema.arguments()) {
    const ArgumentKind kind = kind_of(*argument.type());
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    op.random |= kind == ArgumentKind::generator;
    op.arguments.push_back({.name = argument.name(),
                            .kind = kind,
                            .written = written,
                            .out = written && argument.kwarg_only(),
                            .decides_shape = range || starts_with(argument.name(), "scale")});
  }
  if (op.random) {  // their parameters are checked (a probability above 1), and rarely change
    for (Argument& argument : op.arguments) argument.decides_shape = true;
  }
  for (const c10::Argument& result : schema.returns()) {
    Return described{.argument = -1, .tensor = is_tensor(kind_of(*result.type()))};
    if (const c10::AliasInfo* alias = result.alias_info()) {
      op.view |= !alias->isWrite();
      for (size_t i = 0; i < schema.arguments().size(); ++i) {
        const c10::AliasInfo* source = schema.arguments()[i].alias_info();
        if (source != nullptr && source->beforeSets() == alias->beforeSets())
          described.argument = static_cast<int>(i);
      }
    }
    op.synchronous |= !described.tensor;
    op.returns.push_back(described);
  }
  op.synchronous |=
      op.handle.hasTag(at::Tag::dynamic_output_shape) || op.handle.hasTag(at::Tag::data_dependent_output);
  op.synchronous |= is_one_of(op.name, shaped_by_data);
  op.rehearsable = !is_one_of(op.name, not_rehearsable);
}

std::vector<Operator*> make_all() {
  std::vector<Operator*> operators;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!starts_with(name.name, "aten::") && !starts_with(name.name, "softgpu::")) continue;
    if (auto handle = c10::Dispatcher::singleton().findSchema(name)) {
      auto* op = new Operator(*handle);
      op->name = c10::toString(name);
      operators.push_back(op);
    }
  }
  std::sort(operators.begin(), operators.end(), [](Operator* a, Operator* b) { return a->name < b->name; });
  for (size_t i = 0; i < operators.size(); ++i) {
    operators[i]->index = static_cast<uint32_t>(i);
    operators[i]->check = hash_name(operators[i]->name);
    classify(*operators[i]);
  }
  return operators;
}

}  // namespace

std::vector<Operator*>& all_operators() {
  // Never freed: streams may still run operators while the process ends.
  static auto* operators = new std::vector<Operator*>(make_all());
  return *operators;
}

Operator* find_operator(const std::string& name) {
  auto& operators = all_operators();
  auto found = std::lower_bound(operators.begin(), operators.end(), name,
                                [](Operator* op, const std::string& wanted) { return op->name < wanted; });
  return found != operators.end() && (*found)->name == name ? *found : nullptr;
}

}  // namespace softgpu::aten
