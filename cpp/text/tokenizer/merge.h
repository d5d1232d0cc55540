// Byte-pair merging: repeatedly merges the adjacent pair of lowest rank.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <queue>
#include <utility>
#include <vector>

namespace h2o {

// A part of the text, bytes [begin, end), and its token.
struct Symbol {
  uint32_t begin, end;
  int32_t token;

  uint32_t n_bytes() const { return end - begin; }
};

// The result of merging two neighbors. Lowest rank first; ties: leftmost.
struct Merge {
  double rank;
  int32_t token;
};

// Merges adjacent symbols until no pair is left for which find(left, right), of type
// std::optional<Merge>, returns a value.
template <class Find>
void merge(std::vector<Symbol>& symbols, Find find) {
  constexpr uint32_t kNone = UINT32_MAX;
  struct Link {
    uint32_t previous, next;
  };
  // A pair to merge. Stale if one of its symbols has been merged since.
  struct Candidate {
    double rank;
    uint32_t left, right;
    uint32_t n_bytes;  // of both
    int32_t token;

    bool operator<(const Candidate& other) const {  // priority_queue pops the greatest first
      return rank > other.rank || (rank == other.rank && left > other.left);
    }
  };

  const auto n = static_cast<uint32_t>(symbols.size());
  std::vector<Link> links(n);
  for (uint32_t i = 0; i < n; ++i) links[i] = {i - 1, i + 1 < n ? i + 1 : kNone};

  std::vector<Candidate> candidates;
  const auto consider = [&](uint32_t left, uint32_t right, const auto& keep) {
    if (left == kNone || right == kNone) return;
    if (const std::optional<Merge> found = find(symbols[left], symbols[right])) {
      const uint32_t n_bytes = symbols[left].n_bytes() + symbols[right].n_bytes();
      keep(Candidate{found->rank, left, right, n_bytes, found->token});
    }
  };
  for (uint32_t i = 1; i < n; ++i) {
    consider(i - 1, i, [&](const Candidate& candidate) { candidates.push_back(candidate); });
  }
  std::priority_queue queue(std::less<Candidate>(), std::move(candidates));
  const auto push = [&](const Candidate& candidate) { queue.push(candidate); };

  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol& left = symbols[best.left];
    Symbol& right = symbols[best.right];
    if (left.n_bytes() == 0 || right.n_bytes() == 0) continue;
    if (left.n_bytes() + right.n_bytes() != best.n_bytes) continue;
    left = {left.begin, right.end, best.token};
    right.begin = right.end;
    const uint32_t next = links[best.right].next;
    links[best.left].next = next;
    if (next != kNone) links[next].previous = best.left;
    consider(links[best.left].previous, best.left, push);
    consider(best.left, next, push);
  }
  std::erase_if(symbols, [](const Symbol& symbol) { return symbol.n_bytes() == 0; });
}

}  // namespace h2o
