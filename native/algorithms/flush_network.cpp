#include "algorithms/flush_network.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace jitckpt::algorithms {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
// Rounding leaves crumbs on full edges; below this share of all bytes an edge counts as full.
constexpr double crumb_share = 1e-13;

// Dinic's method on a residual network whose edges lie together by the vertex they leave.
class MaxFlow {
 public:
  struct Edge {
    int32_t source;
    int32_t target;
    double capacity;
  };

  MaxFlow(int32_t vertices, const std::vector<Edge>& edges, double crumb)
      : first_(static_cast<size_t>(vertices) + 1),
        arcs_(2 * edges.size()),
        place_(edges.size()),
        level_(static_cast<size_t>(vertices)),
        next_(static_cast<size_t>(vertices)),
        queue_(static_cast<size_t>(vertices)),
        crumb_(crumb) {
    for (const Edge& edge : edges) {
      ++first_[edge.source + 1];
      ++first_[edge.target + 1];
    }
    for (size_t v = 1; v < first_.size(); ++v) first_[v] += first_[v - 1];
    std::vector<int32_t> fill(first_.begin(), first_.end() - 1);
    for (size_t e = 0; e < edges.size(); ++e) {
      const int32_t forth = fill[edges[e].source]++;
      const int32_t back = fill[edges[e].target]++;
      arcs_[forth] = {edges[e].capacity, edges[e].target, back};
      arcs_[back] = {0.0, edges[e].source, forth};
      place_[e] = forth;
    }
  }

  void enlarge(size_t edge, double by) { arcs_[place_[edge]].residual += by; }
  [[nodiscard]] double flow(size_t edge) const { return arcs_[arcs_[place_[edge]].twin].residual; }

  // Adds to the flow until no path from source to sink is left; returns what was added.
  double augment(int32_t source, int32_t sink) {
    double total = 0;
    while (find_levels(source, sink)) {
      std::copy(first_.begin(), first_.end() - 1, next_.begin());
      total += push(source, sink, infinity);
    }
    return total;
  }

  // After augment: the vertices on the source's side of a least cut.
  [[nodiscard]] bool on_source_side(int32_t vertex) const { return level_[vertex] >= 0; }

 private:
  struct Arc {
    double residual;
    int32_t target;
    int32_t twin;
  };

  // Once the sink has a level nothing further away can lie on a shortest path.
  bool find_levels(int32_t source, int32_t sink) {
    std::fill(level_.begin(), level_.end(), -1);
    level_[source] = 0;
    size_t head = 0;
    size_t tail = 0;
    queue_[tail++] = source;
    while (head < tail) {
      const int32_t v = queue_[head++];
      if (level_[sink] >= 0 && level_[v] + 1 >= level_[sink]) break;
      for (int32_t a = first_[v]; a < first_[v + 1]; ++a) {
        const Arc& arc = arcs_[a];
        if (arc.residual > crumb_ && level_[arc.target] < 0) {
          level_[arc.target] = level_[v] + 1;
          queue_[tail++] = arc.target;
        }
      }
    }
    return level_[sink] >= 0;
  }

  double push(int32_t v, int32_t sink, double limit) {
    if (v == sink) return limit;
    double pushed = 0;
    for (int32_t& a = next_[v]; a < first_[v + 1]; ++a) {
      Arc& arc = arcs_[a];
      if (arc.residual <= crumb_ || level_[arc.target] != level_[v] + 1) continue;
      const double amount = push(arc.target, sink, std::min(limit - pushed, arc.residual));
      if (amount > 0) {
        arc.residual -= amount;
        arcs_[arc.twin].residual += amount;
        pushed += amount;
        if (limit - pushed <= crumb_) return pushed;
      }
    }
    return pushed;
  }

  std::vector<int32_t> first_;
  std::vector<Arc> arcs_;
  std::vector<int32_t> place_;
  std::vector<int32_t> level_;
  std::vector<int32_t> next_;
  std::vector<int32_t> queue_;
  double crumb_;
};

// Throws for sizes that no processes have.
double demand_of(int32_t vertices, const double* supply, const double* room) {
  double demand = 0;
  for (int32_t v = 0; v < vertices; ++v) {
    if (!(supply[v] >= 0) || std::isinf(supply[v]) || !(room[v] >= 0))
      throw std::invalid_argument("vertex " + std::to_string(v) +
                                  ": supply must be finite and at least 0, room at least 0");
    demand += supply[v];
  }
  return demand;
}

// What can flow: first all links in use, whose capacities grow with the seconds, then supplies and rooms.
struct Edges {
  std::vector<MaxFlow::Edge> all;
  std::vector<double> rates;    // of the links among them
  std::vector<size_t> link_of;  // which each of these is
  double seconds = 0;           // that it takes at the least
};

Edges edges_of(const std::vector<Link>& links, const std::vector<uint8_t>& relays, const double* supply,
               const double* room, double demand) {
  const auto vertices = static_cast<int32_t>(relays.size());
  const int32_t source = vertices, sink = vertices + 1;
  Edges edges;
  edges.all.reserve(links.size() + 2 * relays.size());
  std::vector<double> out_rate(relays.size(), 0.0);
  for (size_t l = 0; l < links.size(); ++l) {
    const Link& link = links[l];
    const bool from = supply[link.source] > 0 || relays[link.source] != 0;
    const bool to = room[link.target] > 0 || relays[link.target] != 0;
    if (!from || !to || link.bytes_per_second == 0) continue;
    edges.all.push_back({link.source, link.target, 0.0});
    edges.rates.push_back(link.bytes_per_second);
    edges.link_of.push_back(l);
    out_rate[link.source] += link.bytes_per_second;
  }
  for (int32_t v = 0; v < vertices; ++v) {
    if (supply[v] > 0) {
      edges.all.push_back({source, v, supply[v]});
      if (room[v] == 0 && out_rate[v] > 0) edges.seconds = std::max(edges.seconds, supply[v] / out_rate[v]);
    }
    if (room[v] > 0) edges.all.push_back({v, sink, std::isinf(room[v]) ? 2 * demand : room[v]});
  }
  for (size_t e = 0; e < edges.rates.size(); ++e) edges.all[e].capacity = edges.seconds * edges.rates[e];
  return edges;
}

// When all bytes could be through the least cut that has been found; infinity: never.
double seconds_through_cut(const Edges& edges, const MaxFlow& network, double demand) {
  double fixed = 0;
  double rate = 0;
  for (size_t e = 0; e < edges.all.size(); ++e) {
    const MaxFlow::Edge& edge = edges.all[e];
    if (!network.on_source_side(edge.source) || network.on_source_side(edge.target)) continue;
    if (e < edges.rates.size())
      rate += edges.rates[e];
    else
      fixed += edge.capacity;
  }
  return rate > 0 ? (demand - fixed) / rate : infinity;
}

}  // namespace

FlushNetwork::FlushNetwork(int32_t vertices, std::vector<Link> links, std::vector<uint8_t> relays)
    : vertices_(vertices), links_(std::move(links)), relays_(std::move(relays)) {
  if (vertices < 1) throw std::invalid_argument("a flush network needs at least one vertex");
  if (relays_.size() != static_cast<size_t>(vertices))
    throw std::invalid_argument("relays must have one entry a vertex");
  for (const Link& link : links_) {
    if (link.source < 0 || link.source >= vertices || link.target < 0 || link.target >= vertices)
      throw std::invalid_argument("a link names a vertex outside 0 to " + std::to_string(vertices - 1));
    if (!(link.bytes_per_second >= 0) || std::isinf(link.bytes_per_second))
      throw std::invalid_argument("a link's bytes_per_second must be a finite number of at least 0");
  }
}

FlushPlan FlushNetwork::fastest(const double* supply, const double* room) const {
  const double demand = demand_of(vertices_, supply, room);
  FlushPlan plan{0.0, std::vector<double>(links_.size(), 0.0), 0};
  if (demand == 0) return plan;

  const Edges edges = edges_of(links_, relays_, supply, room, demand);
  const double crumb = demand * crumb_share;
  MaxFlow network(vertices_ + 2, edges.all, crumb);
  plan.seconds = edges.seconds;
  double missing = demand;
  for (;;) {
    missing -= network.augment(vertices_, vertices_ + 1);
    ++plan.max_flows;
    // All crumbs together: at most one an edge.
    if (missing <= crumb * static_cast<double>(edges.all.size())) break;
    const double later = seconds_through_cut(edges, network, demand);
    if (std::isinf(later)) {
      std::vector<int32_t> stuck;
      for (int32_t v = 0; v < vertices_; ++v)
        if (supply[v] > 0 && network.on_source_side(v)) stuck.push_back(v);
      throw Unreachable("bytes have nowhere to go: no link with bandwidth leads from them to enough room",
                        stuck);
    }
    if (!(later > plan.seconds)) break;  // the cut is already met, up to rounding
    for (size_t e = 0; e < edges.rates.size(); ++e)
      network.enlarge(e, (later - plan.seconds) * edges.rates[e]);
    plan.seconds = later;
  }
  for (size_t e = 0; e < edges.rates.size(); ++e) plan.link_bytes[edges.link_of[e]] = network.flow(e);
  return plan;
}

}  // namespace jitckpt::algorithms
