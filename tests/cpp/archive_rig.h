// A cache with an archive, and its input.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_rig.h"
#include "kv/serialized_sequence.h"

namespace h2o {

inline KvShape shape_with(DType dtype, int32_t head_dim, int32_t n_recalled,
                          int32_t n_sequences = 1) {
  return {.n_sequences = n_sequences,
          .n_heads = 4,
          .n_kv_heads = 2,
          .head_dim = head_dim,
          .max_tokens = 400,
          .max_rows = 70,
          .k_dtype = dtype,
          .v_dtype = dtype,
          .archive = {.n_recalled = n_recalled, .k_dtype = dtype, .v_dtype = dtype}};
}

inline constexpr KvPolicy kPolicy{.sinks = 1, .heavy = 9, .recent = 12};

// Chunks, single tokens, and chunks again.
inline std::vector<int32_t> mixed_steps(int32_t n_tokens) {
  std::vector<int32_t> steps;
  for (int32_t done = 0; done < n_tokens; done += steps.back()) {
    const size_t i = steps.size() % 40;
    steps.push_back(std::min(i < 3 ? 30 : i < 36 ? 1 : 5, n_tokens - done));
  }
  return steps;
}

// Keys and queries are integers, so that estimates are exact: bounds have 8 bits from 1/32 on (the
// mean of 16 keys minus half their range), times q 11/16 or q 5/16, and sums are below 2^7.
inline Qkv whole_qkv(Random& random, const KvShape& shape, int32_t n) {
  Qkv in = random_qkv(random, shape, n);
  for (float& x : in.q) x = std::round(x);
  for (float& x : in.k) x = std::round(2 * x);
  return in;
}

// The first sequence, as in a snapshot.
inline std::vector<std::byte> bytes_of(Rig& rig) {
  ByteWriter writer;
  write_sequence(rig.cache(), 0, writer);
  return std::move(writer.bytes());
}

}  // namespace h2o
