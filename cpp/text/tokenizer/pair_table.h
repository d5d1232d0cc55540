// PairTable: what two tokens merge to.
#pragma once

#include <cstdint>
#include <vector>

namespace h2o {

// Sorted, so that no choice of pairs makes it slow.
class PairTable {
 public:
  struct Pair {
    int32_t left, right;
    int32_t rank, token;  // what they become
  };

  PairTable() = default;

  // Tokens are below `n_tokens`. Of a pair that is there twice the one of the highest rank counts.
  PairTable(std::vector<Pair> pairs, int32_t n_tokens);

  // nullptr where the two do not merge.
  const Pair* find(int32_t left, int32_t right) const;

 private:
  std::vector<Pair> pairs_;      // by left, then right
  std::vector<uint32_t> begin_;  // of the pairs with that left; one more than there are tokens
};

}  // namespace h2o
