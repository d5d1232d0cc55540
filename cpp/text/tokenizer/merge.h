// Byte-pair merging: neighbours become one symbol, the most urgent pair of all first.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace h2o {

// A part of a text, bytes [begin, end), and what it stands for.
struct Symbol {
  uint32_t begin, end;
  int32_t token;
};

// What two neighbours would become. The lowest rank goes first, of equals the leftmost.
struct Merge {
  double rank;
  int32_t token;
};

// Merges symbols that follow one another without a gap until find() knows of no pair.
void merge(std::vector<Symbol>& symbols,
           const std::function<std::optional<Merge>(const Symbol&, const Symbol&)>& find);

}  // namespace h2o
