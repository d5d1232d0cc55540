// What the parts of Sampler share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace h2o {

// Loops over the vocabulary go by blocks of fixed size, which compilers vectorise even at -O2. One
// block is one word of the mask of allowed tokens.
constexpr size_t kBlock = 32;

template <typename Value, typename Test>
bool any_in_block(const Value* block, Test test) {
  Value any = 0;  // as wide as the values, for the vectoriser
  for (size_t i = 0; i < kBlock; ++i) any = test(block[i]) ? Value{1} : any;
  return any != 0;
}

// Up to this many candidates are found by a threshold and sorted; more are put into buckets.
constexpr int32_t kMaxSorted = 1024;

// How many buckets there are, of candidates for draw_bucketed.
constexpr int kBucketBits = 10;
constexpr int32_t kBuckets = 1 << kBucketBits;

// The order of candidates, the most likely first.
constexpr auto likelier = [](const auto& a, const auto& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
};

}  // namespace h2o
