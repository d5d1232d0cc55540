#include "text/tokenizer/merge.h"

#include <queue>

namespace h2o {
namespace {

constexpr uint32_t kNone = UINT32_MAX;

struct Link {
  uint32_t previous, next;
};

// A pair to merge. It is out of date if one of the two has since become part of another.
struct Candidate {
  Merge merge;
  uint32_t left, right;
  uint32_t n_bytes;  // of both

  bool operator<(const Candidate& other) const {  // the greatest leaves the queue first
    return merge.rank > other.merge.rank || (merge.rank == other.merge.rank && left > other.left);
  }
};

uint32_t n_bytes(const Symbol& symbol) { return symbol.end - symbol.begin; }

}  // namespace

void merge(std::vector<Symbol>& symbols,
           const std::function<std::optional<Merge>(const Symbol&, const Symbol&)>& find) {
  const auto n = static_cast<uint32_t>(symbols.size());
  std::vector<Link> links(n);
  for (uint32_t i = 0; i < n; ++i) links[i] = {i - 1, i + 1 < n ? i + 1 : kNone};

  std::priority_queue<Candidate> queue;
  const auto consider = [&](uint32_t left, uint32_t right) {
    if (left == kNone || right == kNone) return;
    if (const std::optional<Merge> found = find(symbols[left], symbols[right])) {
      queue.push({*found, left, right, n_bytes(symbols[left]) + n_bytes(symbols[right])});
    }
  };
  for (uint32_t i = 1; i < n; ++i) consider(i - 1, i);

  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol& left = symbols[best.left];
    Symbol& right = symbols[best.right];
    if (n_bytes(left) == 0 || n_bytes(right) == 0) continue;
    if (n_bytes(left) + n_bytes(right) != best.n_bytes) continue;
    left = {left.begin, right.end, best.merge.token};
    right.begin = right.end;
    const uint32_t next = links[best.right].next;
    links[best.left].next = next;
    if (next != kNone) links[next].previous = best.left;
    consider(links[best.left].previous, best.left);
    consider(best.left, next);
  }
  std::erase_if(symbols, [](const Symbol& symbol) { return n_bytes(symbol) == 0; });
}

}  // namespace h2o
