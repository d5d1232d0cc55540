// StopStrings: finds where the first of several strings ends in a stream of bytes (Aho and
// Corasick, CACM 18(6), 1975). One pass, whatever their number.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace h2o {

class StopStrings {
 public:
  // What the bytes so far end with; 0 where nothing has begun.
  using State = int32_t;

  // Throws InvalidArgument for a string that is empty or not UTF-8.
  explicit StopStrings(std::span<const std::string> strings = {});

  State next(State state, unsigned char byte) const;

  // Length of the longest end of the bytes so far that begins one of the strings.
  size_t begun(State state) const { return nodes_[state].depth; }

  // Length of the longest of the strings that the bytes so far end with; 0 if there is none.
  size_t complete(State state) const { return nodes_[state].complete; }

 private:
  struct Node {
    int32_t first_edge = 0, n_edges = 0;
    State fallback = 0;  // its longest proper suffix that is a node
    uint32_t depth = 0, complete = 0;
  };
  struct Edge {
    unsigned char byte;
    State to;
  };

  State child(State state, unsigned char byte) const;  // -1: there is none

  std::vector<Node> nodes_;
  std::vector<Edge> edges_;  // of each node together, by byte
};

}  // namespace h2o
