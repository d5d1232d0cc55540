// PairTable: looks up what two tokens merge into.
#pragma once

#include <cstdint>
#include <vector>

namespace h2o {

// A sorted array, so that there is no adversarial worst case.
class PairTable {
 public:
  struct Pair {
    int32_t left, right;
    int32_t rank, token;  // of the result
  };

  PairTable() = default;

  // Tokens are less than `n_tokens`. Of duplicate pairs the one with the highest rank is kept.
  PairTable(std::vector<Pair> pairs, int32_t n_tokens);

  // nullptr if the pair does not merge.
  const Pair* find(int32_t left, int32_t right) const;

 private:
  std::vector<Pair> pairs_;      // by left, then right
  std::vector<uint32_t> begin_;  // [n_tokens + 1] first pair of each left token
};

}  // namespace h2o
