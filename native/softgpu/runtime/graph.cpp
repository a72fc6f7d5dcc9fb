// Graphs: what can be asked about them, and their launches.
#include "softgpu/runtime/graph.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <unordered_map>
#include <utility>

#include "softgpu/runtime/capture.h"
#include "softgpu/runtime/enqueue.h"
#include "softgpu/runtime/handles.h"
#include "softgpu/runtime/stream_functions.h"

namespace softgpu {
namespace {

HandleTable<cudaGraph_t, Graph>& graphs() {
  static auto* const table = new HandleTable<cudaGraph_t, Graph>;
  return *table;
}

HandleTable<cudaGraphNode_t, Node>& nodes() {
  static auto* const table = new HandleTable<cudaGraphNode_t, Node>;
  return *table;
}

HandleTable<cudaGraphExec_t, GraphExec>& executables() {
  static auto* const table = new HandleTable<cudaGraphExec_t, GraphExec>;
  return *table;
}

std::shared_ptr<Graph> find_graph(cudaGraph_t handle) {
  auto graph = graphs().find(handle);
  require(graph != nullptr, cudaErrorInvalidValue, "there is no such graph (any more)");
  return graph;
}

std::shared_ptr<GraphExec> find_executable(cudaGraphExec_t handle) {
  auto executable = executables().find(handle);
  require(executable != nullptr, cudaErrorInvalidValue, "there is no such executable graph (any more)");
  return executable;
}

// The nodes one after the other, in an order that keeps to what depends on what. A GPU may run at the same
// time what does not; the results are the same.
class GraphRun final : public Work {
 public:
  explicit GraphRun(std::vector<std::unique_ptr<Work>> works) : works_(std::move(works)) {}

  void run() override {
    if (finished()) return;
    works_[next_]->run();
    if (works_[next_]->finished()) works_[next_++].reset();
  }
  bool finished() const override { return next_ == works_.size(); }
  bool foreign() const override { return !finished() && works_[next_]->foreign(); }

 private:
  std::vector<std::unique_ptr<Work>> works_;
  std::size_t next_ = 0;
};

const char* name_of(cudaGraphNodeType type) {
  switch (type) {
    case cudaGraphNodeTypeKernel:
      return "kernel";
    case cudaGraphNodeTypeMemcpy:
      return "memcpy";
    case cudaGraphNodeTypeMemset:
      return "memset";
    case cudaGraphNodeTypeHost:
      return "host function";
    case cudaGraphNodeTypeGraph:
      return "graph";
    default:
      return "node";
  }
}

// As many handles as there is room for; without any room, how many there are.
void write_handles(const std::vector<Node*>& of, cudaGraphNode_t* to, std::size_t* count) {
  require_place(count);
  if (to != nullptr) {
    const std::size_t room = std::exchange(*count, std::min(*count, of.size()));
    std::transform(of.begin(), of.begin() + static_cast<std::ptrdiff_t>(*count), to, handle_of);
    std::fill(to + *count, to + room, nullptr);
  } else {
    *count = of.size();
  }
}

std::vector<Node*> pointers(const std::vector<std::shared_ptr<Node>>& of) {
  std::vector<Node*> all;
  for (const auto& node : of) all.push_back(node.get());
  return all;
}

// Where in the graph each node's dependencies stand.
std::vector<std::vector<std::size_t>> places_of_dependencies(
    const std::vector<std::shared_ptr<Node>>& nodes) {
  std::unordered_map<const Node*, std::size_t> place;
  std::vector<std::vector<std::size_t>> all;
  for (const auto& node : nodes) {
    place.emplace(node.get(), place.size());
    all.emplace_back();
    for (const Node* dependency : node->dependencies) all.back().push_back(place.at(dependency));
  }
  return all;
}

}  // namespace

cudaGraph_t add_graph(std::shared_ptr<Graph> graph) { return graphs().add(std::move(graph)); }

void remove_graph(cudaGraph_t handle) {
  const auto graph = graphs().remove(handle);
  require(graph != nullptr, cudaErrorInvalidValue, "there is no such graph (any more) to destroy");
  for (const auto& node : graph->nodes) nodes().remove(handle_of(node.get()));
}

void add_node_handle(const std::shared_ptr<Node>& node) { nodes().add(node); }

Node& find_node(cudaGraphNode_t handle) {
  const auto node = nodes().find(handle);
  require(node != nullptr, cudaErrorInvalidValue, "there is no such node (any more)");
  return *node;
}

std::unique_ptr<Work> GraphExec::make_work() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::unique_ptr<Work>> works;
  for (const auto& node : nodes_) works.push_back(node->make());
  return std::make_unique<GraphRun>(std::move(works));
}

void GraphExec::launch(Stream& stream) {
  if (captures(stream)) {
    add_node(stream, cudaGraphNodeTypeGraph, "", [self = shared_from_this()] { return self->make_work(); });
    return;
  }
  const auto order = keep_launch_order();
  auto work = make_work();
  const std::lock_guard lock(mutex_);
  last_ = stream.device.enqueue(stream, std::move(work), {last_});
}

const Node* GraphExec::update(const Graph& graph) {
  const std::lock_guard lock(mutex_);
  const auto before = places_of_dependencies(nodes_), after = places_of_dependencies(graph.nodes);
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    const bool same = i < nodes_.size() && graph.nodes[i]->type == nodes_[i]->type && after[i] == before[i];
    if (!same) return graph.nodes[i].get();
  }
  if (graph.nodes.size() < nodes_.size()) return nodes_[graph.nodes.size()].get();
  nodes_ = graph.nodes;
  return nullptr;
}

}  // namespace softgpu

using namespace softgpu;

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return call([&] {
    remove_graph(graph);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  return call([&] {
    write_handles(pointers(find_graph(graph)->nodes), nodes, count);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphGetRootNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  return call([&] {
    auto roots = pointers(find_graph(graph)->nodes);
    std::erase_if(roots, [](const Node* node) { return !node->dependencies.empty(); });
    write_handles(roots, nodes, count);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  return call([&] {
    require_place(type);
    *type = find_node(node).type;
    return cudaSuccess;
  });
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* dependencies,
                                         cudaGraphEdgeData* edges, size_t* count) {
  return call([&] {
    write_handles(find_node(node).dependencies, dependencies, count);
    if (dependencies != nullptr && edges != nullptr) std::memset(edges, 0, *count * sizeof *edges);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  return device_call([&](Device&) {
    require_place(executable);
    constexpr unsigned long long known = cudaGraphInstantiateFlagAutoFreeOnLaunch |
                                         cudaGraphInstantiateFlagUpload |
                                         cudaGraphInstantiateFlagUseNodePriority;
    require((flags & cudaGraphInstantiateFlagDeviceLaunch) == 0, cudaErrorNotSupported,
            "softgpu has no graphs that a kernel launches (cudaGraphInstantiateFlagDeviceLaunch)");
    require((flags & ~known) == 0, cudaErrorInvalidValue, "unknown flags");
    *executable = executables().add(std::make_shared<GraphExec>(*find_graph(graph), flags));
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}

cudaError_t cudaGraphExecGetFlags(cudaGraphExec_t executable, unsigned long long* flags) {
  return call([&] {
    require_place(flags);
    *flags = find_executable(executable)->flags;
    return cudaSuccess;
  });
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t executable, cudaGraph_t graph,
                                cudaGraphExecUpdateResultInfo* result) {
  return call([&] {
    require_place(result);
    const Node* const differs = find_executable(executable)->update(*find_graph(graph));
    *result = {};
    if (differs == nullptr) return cudaSuccess;
    result->result = cudaGraphExecUpdateErrorTopologyChanged;
    result->errorNode = handle_of(const_cast<Node*>(differs));
    return cudaErrorGraphExecUpdateFailure;
  });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return call([&] {
    require(executables().remove(executable) != nullptr, cudaErrorInvalidValue,
            "there is no such executable graph (any more) to destroy");
    return cudaSuccess;
  });
}

// There is nothing that the first launch would have to bring to the device.
cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t stream) {
  return device_call([&](Device&) {
    find_stream(stream);
    find_executable(executable);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return device_call([&](Device&) {
    find_executable(executable)->launch(*find_stream(stream));
    return cudaSuccess;
  });
}

cudaError_t cudaGraphDebugDotPrint(cudaGraph_t handle, const char* path, unsigned) {
  return call([&] {
    require(path != nullptr, cudaErrorInvalidValue, "no path to write to");
    const auto graph = find_graph(handle);
    std::ofstream file(path);
    file << "digraph dot {\n";
    const auto dependencies = places_of_dependencies(graph->nodes);
    for (std::size_t i = 0; i < graph->nodes.size(); ++i) {
      const Node& node = *graph->nodes[i];
      file << "  node" << i << " [label=\"" << name_of(node.type) << (node.text.empty() ? "" : " ")
           << node.text << "\"];\n";
      for (const std::size_t dependency : dependencies[i])
        file << "  node" << dependency << " -> node" << i << ";\n";
    }
    file << "}\n";
    file.close();
    require(file.good(), cudaErrorOperatingSystem, "the file to print the graph to can't be written");
    return cudaSuccess;
  });
}
