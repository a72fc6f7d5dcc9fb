// Which process sends how much to whose spare memory, so that all are done soonest: exact.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace jitckpt::algorithms {

struct Link {
  int32_t source;
  int32_t target;
  double bytes_per_second;
};

struct FlushPlan {
  double seconds;                  // until the last transfer ends; all run at the same time
  std::vector<double> link_bytes;  // by link, in the order given
  int max_flows;                   // how many cuts were tried
};

// Some bytes can reach no spare memory at all; `vertices` are those from which they cannot get away.
struct Unreachable : std::runtime_error {
  Unreachable(const std::string& text, std::vector<int32_t> stuck)
      : std::runtime_error(text), vertices(std::move(stuck)) {}
  std::vector<int32_t> vertices;
};

// A fixed topology; sizes change from save to save.
//
// In T seconds link e carries up to T x bandwidth(e), so the smallest T for which the maximum flow carries
// everything is the answer. The flow through a cut is a straight line over T; starting below the answer,
// the line of the least cut at T gives the next T (Newton's method), never past the answer, and the flow
// found so far stays valid because capacities only grow.
class FlushNetwork {
 public:
  // relays[v]: others' bytes may pass through v (a switch); other vertices only send or only receive.
  FlushNetwork(int32_t vertices, std::vector<Link> links, std::vector<uint8_t> relays);

  // supply[v]: bytes that must leave v; room[v]: bytes that v can take (may be infinite).
  [[nodiscard]] FlushPlan fastest(const double* supply, const double* room) const;

  [[nodiscard]] int32_t vertices() const { return vertices_; }
  [[nodiscard]] size_t links() const { return links_.size(); }

 private:
  int32_t vertices_;
  std::vector<Link> links_;
  std::vector<uint8_t> relays_;
};

}  // namespace jitckpt::algorithms
