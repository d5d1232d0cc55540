// StopStrings: finds the first occurrence of any of several strings in a byte stream (Aho and
// Corasick, CACM 18(6), 1975).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace h2o {

class StopStrings {
 public:
  // The automaton's state after the bytes so far; 0: the root.
  using State = int32_t;

  // Throws InvalidArgument for a string that is empty or not UTF-8.
  explicit StopStrings(std::span<const std::string> strings = {});

  State next(State state, unsigned char byte) const;

  // Length of the longest suffix of the input that is a proper prefix of, or equal to, a string.
  size_t partial(State state) const { return nodes_[state].depth; }

  // Length of the longest string that is a suffix of the input; 0 if there is none.
  size_t complete(State state) const { return nodes_[state].complete; }

 private:
  struct Node {
    int32_t first_edge = 0, n_edges = 0;
    State fallback = 0;  // longest proper suffix that is a node
    uint32_t depth = 0, complete = 0;
  };
  struct Edge {
    unsigned char byte;
    State to;
  };

  State child(State state, unsigned char byte) const;  // -1: there is none

  std::vector<Node> nodes_;
  std::vector<Edge> edges_;  // sorted by node, then byte
};

}  // namespace h2o
