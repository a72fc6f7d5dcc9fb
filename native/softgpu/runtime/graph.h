// A CUDA graph: work that can be made anew for each of its launches.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "softgpu/runtime/error.h"
#include "softgpu/runtime/stream.h"

namespace softgpu {

// The work of one launch; called on the host, as the graph is launched.
using WorkMaker = std::function<std::unique_ptr<Work>()>;

struct Node {
  const cudaGraphNodeType type;
  const std::string text;  // a kernel's name
  const WorkMaker make;
  std::vector<Node*> dependencies;  // all of them stand before it in its graph
};

struct Graph {
  std::vector<std::shared_ptr<Node>> nodes;  // each behind those that it depends on
};

// A graph that can be launched, whatever becomes of the graph that it was made of.
class GraphExec : public std::enable_shared_from_this<GraphExec> {
 public:
  GraphExec(const Graph& graph, unsigned long long flags) : flags(flags), nodes_(graph.nodes) {}

  const unsigned long long flags;

  std::unique_ptr<Work> make_work() const;

  // Behind the launch before, wherever that was: one and the same graph never runs twice at a time.
  void launch(Stream& stream);

  // Takes the nodes of a graph of the same form. Returns the first that differs, or null; then nothing has
  // changed.
  const Node* update(const Graph& graph);

 private:
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Node>> nodes_;
  Point last_;
};

// A handle for a graph that a capture fills, and the end of one that came to nothing.
cudaGraph_t add_graph(std::shared_ptr<Graph> graph);
void remove_graph(cudaGraph_t graph);
void add_node_handle(const std::shared_ptr<Node>& node);
Node& find_node(cudaGraphNode_t node);

inline cudaGraphNode_t handle_of(Node* node) { return reinterpret_cast<cudaGraphNode_t>(node); }

}  // namespace softgpu
