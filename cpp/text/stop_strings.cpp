#include "text/stop_strings.h"

#include <algorithm>

#include "core/error.h"
#include "core/utf8.h"

namespace h2o {

StopStrings::StopStrings(std::span<const std::string> strings) : nodes_(1) {
  std::vector<std::string_view> sorted(strings.begin(), strings.end());
  for (const std::string_view s : sorted) {
    require(!s.empty(), "a stop string is empty, expected at least one character");
    require(is_utf8(s), "a stop string is not valid UTF-8");
  }
  std::ranges::sort(sorted);

  // Breadth first: a node is the range of sorted strings that share its prefix.
  struct Range {
    size_t begin, end;
  };
  std::vector<Range> ranges = {{0, sorted.size()}};
  for (State parent = 0; parent < std::ssize(nodes_); ++parent) {
    const uint32_t depth = nodes_[parent].depth;
    auto [at, end] = ranges[parent];
    while (at < end && sorted[at].size() == depth) ++at;  // strings that end at this node
    nodes_[parent].first_edge = static_cast<int32_t>(edges_.size());
    while (at < end) {
      const auto byte = static_cast<unsigned char>(sorted[at][depth]);
      size_t last = at;
      while (last < end && static_cast<unsigned char>(sorted[last][depth]) == byte) ++last;
      Node node{.depth = depth + 1};
      // The fallback is less deep than the node, so it and its edges are complete.
      if (parent != 0) node.fallback = next(nodes_[parent].fallback, byte);
      const bool ends = sorted[at].size() == depth + 1;
      node.complete = ends ? depth + 1 : nodes_[node.fallback].complete;
      edges_.push_back({byte, static_cast<State>(nodes_.size())});
      ++nodes_[parent].n_edges;
      nodes_.push_back(node);
      ranges.push_back({at, last});
      at = last;
    }
  }
}

StopStrings::State StopStrings::next(State state, unsigned char byte) const {
  while (true) {
    if (const State to = child(state, byte); to >= 0) return to;
    if (state == 0) return 0;
    state = nodes_[state].fallback;
  }
}

StopStrings::State StopStrings::child(State state, unsigned char byte) const {
  const Node& node = nodes_[state];
  const std::span<const Edge> edges(edges_.data() + node.first_edge, node.n_edges);
  const auto found = std::ranges::lower_bound(edges, byte, {}, &Edge::byte);
  return found != edges.end() && found->byte == byte ? found->to : -1;
}

}  // namespace h2o
