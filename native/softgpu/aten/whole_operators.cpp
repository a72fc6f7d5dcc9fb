// Operators that torch builds from others, differently on CUDA and on the CPU, so that their results differ
// in the last bits. Here the whole operator is one kernel: the CPU's way. Its gradient is a kernel too, which
// runs the CPU's forward once more under autograd and asks for the gradients.
#include <ATen/autocast_mode.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "softgpu/aten/call.h"
#include "softgpu/aten/special.h"

namespace softgpu::aten {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const char* const whole_operators[] = {"_fused_rms_norm", "gru.data",       "gru.input",     "gru_cell",
                                       "lstm.data",       "lstm.input",     "lstm_cell",     "renorm",
                                       "rnn_relu.data",   "rnn_relu.input", "rnn_relu_cell", "rnn_tanh.data",
                                       "rnn_tanh.input",  "rnn_tanh_cell"};

std::string gradient_name(const std::string& name) {  // lstm.input -> lstm_gradient.input
  const size_t dot = name.find('.');
  return name.substr(0, dot) + "_gradient" + (dot == std::string::npos ? "" : name.substr(dot));
}

// Calls `visit` for every tensor among the arguments, in order, and puts what it returns in its place.
template <class Visit>
void replace_tensors(const Operator& op, c10::IValue* arguments, Visit visit) {
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    if (op.arguments[i].kind == ArgumentKind::tensor && arguments[i].isTensor()) {
      arguments[i] = visit(arguments[i].toTensor());
    } else if (op.arguments[i].kind == ArgumentKind::tensor_list) {
      c10::List<at::Tensor> replaced;
      for (const c10::IValue& element : arguments[i].toListRef())
        replaced.push_back(visit(element.toTensor()));
      arguments[i] = replaced;
    }
  }
}

// The CPU kernel of a gradient. Arguments: those of the operator, the gradients of its results, and which of
// its tensors need one. Returns the gradients of its tensors.
class Gradient final : public c10::OperatorKernel {
 public:
  explicit Gradient(c10::OperatorHandle op) : handle_(op) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, c10::Stack* stack) {
    static const c10::DispatchKeySet usual(
        {c10::DispatchKey::BackendSelect, c10::DispatchKey::ADInplaceOrView});
    c10::impl::ForceDispatchKeyGuard with_autograd(usual, c10::autocast_dispatch_keyset);
    at::AutoGradMode enabled(true);
    const std::vector<bool> needed = stack->back().toBoolList().vec();
    stack->pop_back();
    const auto gradients = torch::jit::pop(*stack).toOptionalTensorList();
    variable_list inputs;
    size_t index = 0;
    Operator& op = *find_operator(c10::toString(handle_.operator_name()));
    replace_tensors(op, &*(stack->end() - op.arguments.size()), [&](const at::Tensor& tensor) {
      at::Tensor own = tensor.defined() ? tensor.detach() : tensor;
      if (needed[index++]) inputs.push_back(own.requires_grad_());
      return own;
    });
    handle_.callBoxed(stack);
    variable_list outputs, output_gradients;
    for (size_t i = 0; i < op.returns.size(); ++i) {
      const std::optional<at::Tensor> gradient = gradients.get(i);
      const at::Tensor& output = (stack->end() - op.returns.size() + i)->toTensor();
      if (!gradient || !output.requires_grad()) continue;
      outputs.push_back(output);
      output_gradients.push_back(*gradient);
    }
    torch::jit::drop(*stack, op.returns.size());
    const variable_list found =
        torch::autograd::grad(outputs, inputs, output_gradients, std::nullopt, false, true);
    c10::List<at::Tensor> all;
    size_t next = 0;
    for (bool need : needed) all.push_back(need ? found[next++] : at::Tensor());
    stack->emplace_back(all);
  }

 private:
  c10::OperatorHandle handle_;
};

struct Differentiable : torch::autograd::Function<Differentiable> {
  static variable_list forward(AutogradContext* context, Operator* op, at::TensorList tensors,
                               const c10::Stack* arguments) {
    c10::Stack stack = *arguments;
    c10::Stack others = *arguments;  // without the tensors, which autograd saves
    replace_tensors(*op, others.data(), [](const at::Tensor&) { return at::Tensor(); });
    context->saved_data["operator"] = static_cast<int64_t>(op->index);
    context->saved_data["arguments"] = c10::ivalue::Tuple::create(std::move(others));
    context->save_for_backward(tensors.vec());
    at::AutoDispatchBelowADInplaceOrView below;
    call_operator(*op, &stack);
    variable_list results;
    for (const c10::IValue& result : stack) results.push_back(result.toTensor());
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Operator& op = *all_operators()[context->saved_data["operator"].toInt()];
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), "softgpu has no gradient of the gradient of ",
                                op.name, ": call backward without create_graph");
    const variable_list saved = context->get_saved_variables();
    c10::Stack stack = context->saved_data["arguments"].toTupleRef().elements().vec();
    size_t next = 0;
    replace_tensors(op, stack.data(), [&](const at::Tensor&) { return saved[next++]; });
    c10::List<std::optional<at::Tensor>> given;
    for (const at::Tensor& gradient : gradients) {
      given.push_back(gradient.defined() ? std::optional(gradient) : std::nullopt);
    }
    c10::List<bool> needed;
    for (size_t i = 0; i < saved.size(); ++i)
      needed.push_back(saved[i].defined() && context->needs_input_grad(i));
    stack.emplace_back(given);
    stack.emplace_back(needed);
    call_operator(*find_operator("softgpu::" + gradient_name(op.name.substr(sizeof "aten::" - 1))), &stack);
    variable_list results = {at::Tensor()};  // for `op`
    for (const c10::IValue& result : stack.back().toListRef()) results.push_back(result.toTensor());
    results.emplace_back();  // for `arguments`
    return results;
  }
};

// Between the layers of a recurrent network, dropout takes its numbers from the CUDA generator: torch's own
// way of building the operator does that.
bool drops_out(const Operator& op, const c10::IValue* arguments) {
  bool dropout = false, train = false, layers = false;
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    if (op.arguments[i].name == "dropout") dropout = arguments[i].toDouble() > 0;
    if (op.arguments[i].name == "train") train = arguments[i].toBool();
    if (op.arguments[i].name == "num_layers") layers = arguments[i].toInt() > 1;
  }
  return dropout && train && layers;
}

class Whole final : public c10::OperatorKernel {
 public:
  explicit Whole(Operator& op) : op_(op) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, c10::Stack* stack) {
    c10::IValue* arguments = &*(stack->end() - op_.arguments.size());
    const bool autocast = at::autocast::is_autocast_enabled(at::kCUDA);
    c10::impl::ExcludeDispatchKeyGuard cast_already(c10::DispatchKey::AutocastCUDA);
    if (autocast) {
      const at::ScalarType type = at::autocast::get_autocast_dtype(at::kCUDA);
      replace_tensors(op_, arguments, [&](const at::Tensor& tensor) {
        return tensor.defined() ? at::autocast::cached_cast(type, tensor, at::kCUDA) : tensor;
      });
    }
    if (drops_out(op_, arguments)) {
      op_.handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::AutogradMeta), stack);
      return;
    }
    variable_list tensors;
    bool differentiable = false;
    replace_tensors(op_, arguments, [&](const at::Tensor& tensor) {
      tensors.push_back(tensor);
      differentiable |= tensor.defined() && tensor.requires_grad();
      return tensor;
    });
    if (!differentiable || !at::GradMode::is_enabled() ||
        c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradCUDA)) {
      at::AutoDispatchBelowADInplaceOrView below;
      call_operator(op_, stack);
      return;
    }
    c10::Stack own(stack->end() - op_.arguments.size(), stack->end());
    torch::jit::drop(*stack, op_.arguments.size());
    for (at::Tensor& result : Differentiable::apply(&op_, at::TensorList(tensors), &own))
      stack->emplace_back(result);
  }

 private:
  Operator& op_;
};

torch::CppFunction kernel(Operator& op) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Whole>(op));
}

}  // namespace

void define_gradients() {
  // Never freed, as all operators.
  auto& library = *new torch::Library(torch::Library::FRAGMENT, "softgpu", std::nullopt, __FILE__, __LINE__);
  for (const char* name : whole_operators) {
    const std::string text = name;
    const size_t dot = text.find('.');
    const auto handle = c10::Dispatcher::singleton().findSchema(
        {"aten::" + text.substr(0, dot), dot == std::string::npos ? "" : text.substr(dot + 1)});
    if (!handle) continue;
    const c10::FunctionSchema& schema = handle->schema();
    std::vector<c10::Argument> arguments = schema.arguments();
    arguments.emplace_back("gradients",
                           c10::ListType::create(c10::OptionalType::create(c10::TensorType::get())));
    arguments.emplace_back("needed", c10::ListType::create(c10::BoolType::get()));
    const c10::OperatorName own = {"softgpu::" + gradient_name(text.substr(0, dot)), schema.overload_name()};
    library.def(c10::FunctionSchema(own.name, own.overload_name, std::move(arguments),
                                    {c10::Argument("", c10::ListType::create(c10::TensorType::get()))}));
    library.impl(c10::toString(own).substr(sizeof "softgpu::" - 1).c_str(),
                 torch::dispatch(c10::DispatchKey::CPU, torch::CppFunction::makeFromBoxedFunctor(
                                                            std::make_unique<Gradient>(*handle))));
  }
}

void register_whole_operators(SpecialKernels& kernels) {
  for (const char* name : whole_operators) {
    if (Operator* op = find_operator(std::string("aten::") + name)) {
      kernels.implement_boxed(op->name, kernel(*op), kernel(*op));
    }
  }
}

}  // namespace softgpu::aten
