// Shared by the parts of Sampler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace h2o {

// Loops over the vocabulary use fixed-size blocks, which compilers vectorize even at -O2. A block
// corresponds to one word of the mask of allowed tokens.
constexpr size_t kBlock = 32;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <typename Value, typename Test>
bool any_in_block(const Value* block, Test test) {
  Value any = 0;  // same width as the values, for vectorization
  for (size_t i = 0; i < kBlock; ++i) any = test(block[i]) ? Value{1} : any;
  return any != 0;
}

// Up to this many candidates are selected by a threshold and sorted; more are distributed to
// buckets.
constexpr int32_t kMaxSorted = 1024;

// Number of buckets of draw_bucketed(), as a power of two.
constexpr int kBucketBits = 10;
constexpr int32_t kBuckets = 1 << kBucketBits;

// Descending likelihood.
constexpr auto likelier = [](const auto& a, const auto& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
};

}  // namespace h2o
