// KvView: what an attention kernel sees of the cache: one layer, by value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "kv/policy.h"

namespace h2o {

// The slots of one (sequence, kv_head) in one layer.
//
// Slots are filled in order; from then on each new token takes the slot of the one it evicts.
// Roles are predicates on position and score, never places: no row is ever moved. Between steps
// at most one row of a filled pool is dead, the one in `next_slot`.
struct KvHead {
  std::byte* k;        // [slots, head_dim] in k_dtype
  std::byte* v;        // [slots, head_dim]
  int32_t* positions;  // [slots]
  float* scores;       // [slots] attention received so far; nullptr unless the policy needs it
  int32_t* next_slot;  // where the next token goes
};

// Rows of a chunk that is longer than the free slots wait here until the chunk has been attended.
struct KvChunk {
  std::byte* k;   // [max_rows, head_dim]
  std::byte* v;   // [max_rows, head_dim]
  float* scores;  // [max_rows]
};

struct KvView {
  KvPolicy policy;
  DType k_dtype;
  DType v_dtype;
  int32_t n_heads;  // query heads; n_heads / n_kv_heads of them share a kv_head
  int32_t n_kv_heads;
  int32_t head_dim;
  int32_t slots;        // per sequence and kv_head
  int32_t max_rows;     // of a batch
  int64_t k_row_bytes;  // of one slot's K, [head_dim] in k_dtype
  int64_t v_row_bytes;

  // Layer bases; [n_sequences, n_kv_heads, slots, ...]
  std::byte* k;
  std::byte* v;
  int32_t* positions;
  float* scores;       // nullptr unless policy.keeps_scores()
  int32_t* next_slot;  // [n_sequences, n_kv_heads]

  // Shared by all layers; [n_kv_heads, max_rows, ...], row = row of the batch
  std::byte* chunk_k;
  std::byte* chunk_v;
  float* chunk_scores;
  std::byte* workspace;  // as many bytes as the back end asked for

  H2O_HD bool evicts() const { return slots > policy.budget(); }

  H2O_HD KvHead head(int32_t sequence, int32_t kv_head) const {
    const int64_t i = int64_t{sequence} * n_kv_heads + kv_head;
    return {k + i * slots * k_row_bytes, v + i * slots * v_row_bytes, positions + i * slots,
            scores != nullptr ? scores + i * slots : nullptr, next_slot + i};
  }

  H2O_HD KvChunk chunk(int32_t kv_head, int32_t row) const {
    const int64_t i = int64_t{kv_head} * max_rows + row;
    return {chunk_k + i * k_row_bytes, chunk_v + i * v_row_bytes, chunk_scores + i};
  }
};

}  // namespace h2o
