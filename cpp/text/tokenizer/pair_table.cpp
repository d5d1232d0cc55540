#include "text/tokenizer/pair_table.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace h2o {

PairTable::PairTable(std::vector<Pair> pairs, int32_t n_tokens)
    : pairs_(std::move(pairs)), begin_(size_t{1} + n_tokens) {
  std::ranges::sort(pairs_, [](const Pair& a, const Pair& b) {
    return std::tuple(a.left, a.right, -a.rank) < std::tuple(b.left, b.right, -b.rank);
  });
  const auto same = [](const Pair& a, const Pair& b) {
    return a.left == b.left && a.right == b.right;
  };
  pairs_.erase(std::unique(pairs_.begin(), pairs_.end(), same), pairs_.end());
  pairs_.shrink_to_fit();
  for (int32_t left = 0; left <= n_tokens; ++left) {
    const auto it = std::ranges::lower_bound(pairs_, left, {}, &Pair::left);
    begin_[left] = static_cast<uint32_t>(it - pairs_.begin());
  }
}

const PairTable::Pair* PairTable::find(int32_t left, int32_t right) const {
  const auto end = pairs_.begin() + begin_[left + 1];
  const auto it =
      std::ranges::lower_bound(pairs_.begin() + begin_[left], end, right, {}, &Pair::right);
  return it != end && it->right == right ? &*it : nullptr;
}

}  // namespace h2o
