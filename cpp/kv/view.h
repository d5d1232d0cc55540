// KvView: what an attention kernel sees of one layer of the cache, passed by value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "kv/policy.h"

namespace h2o {

class KvArchive;
struct ArchiveMemory;

// The slots of one (sequence, kv_head) in one layer.
//
// Slots are filled in order; once all are filled, each new token overwrites the slot of the token
// it evicts. Being recent or heavy depends on position and score, not on the slot; rows are never
// moved. Between steps at most one row of a filled pool is free, the one in `next_slot`.
struct KvHead {
  KvPolicy policy;
  int32_t slots;       // used by the policy, at most the layer's
  std::byte* k;        // [slots, head_dim] in k_dtype
  std::byte* v;        // [slots, head_dim]
  int32_t* positions;  // [slots]
  float* scores;       // [slots] accumulated attention; nullptr unless the policy uses it
  float* value_norms;  // [slots] see policy.value_norm; nullptr unless the policy uses it
  int32_t* ranks;      // [slots] number of older kept tokens; nullptr unless the cache may roll
  int32_t* next_slot;  // where the next token is stored
  int32_t number;      // among the kv_heads of all layers

  H2O_HD bool evicts() const { return policy.evicts(slots); }

  // Slots filled by the first `length` tokens of a sequence, including a free one.
  H2O_HD int32_t written(int32_t length) const { return length < slots ? length : slots; }
  H2O_HD int32_t vacant_slot(int32_t length) const { return length < slots ? -1 : *next_slot; }
};

// Staging area for rows of a chunk that is longer than the free slots, until the chunk has been
// attended.
struct KvStaging {
  std::byte* k;        // [max_rows, head_dim]
  std::byte* v;        // [max_rows, head_dim]
  float* scores;       // [max_rows]
  float* value_norms;  // [max_rows]
};

struct KvView {
  DType k_dtype;
  DType v_dtype;
  int32_t n_heads;  // query heads; n_heads / n_kv_heads of them share a kv_head
  int32_t n_kv_heads;
  int32_t head_dim;
  int32_t largest_head_dim;  // of all layers
  int32_t n_sequences;
  int32_t slots;        // per sequence and kv_head, of this layer
  int32_t max_rows;     // per batch
  int64_t k_row_bytes;  // K of one slot, [head_dim] in k_dtype
  int64_t v_row_bytes;

  // Base pointers; [n_sequences, n_kv_heads, slots, ...]
  std::byte* k;
  std::byte* v;
  int32_t* positions;
  float* scores;       // nullptr unless a policy uses scores
  float* value_norms;  // nullptr unless a policy uses them
  int32_t* ranks;      // nullptr unless the cache may roll
  int32_t* next_slot;  // [n_sequences, n_kv_heads]
  KvPolicy* policies;  // [n_sequences]
  float* states;       // [n_sequences, state_floats] of a layer with a recurrent state; or nullptr
  int64_t state_floats;   // 0 without
  int32_t first_head;     // number of the layer's first kv_head
  bool scores_questions;  // does one of them use Scoring::question?

  // [n_kv_heads, head_dim, head_dim] the sum of W^T W over the query heads of a kv_head, where W
  // are the columns of W_O of one head; nullptr unless a policy weighs values by outputs
  const float* output_gram;

  // Shared by all layers; [n_kv_heads, max_rows, ...], indexed by batch row
  std::byte* staged_k;
  std::byte* staged_v;
  float* staged_scores;
  float* staged_value_norms;
  // [ranks, n_rot] as Backend::compute_rope_table; nullptr unless it may roll
  const float* rope_table;
  std::byte* workspace;  // of the size that the back end requested

  const KvArchive* archive;       // of evicted tokens, in host memory; nullptr: none in this layer
  int32_t layer;                  // index of this layer in the archive
  const ArchiveMemory* archives;  // [n_sequences]; nullptr as `archive`
  // [n_kv_heads] ArchiveLayout::head() of each, -1: not archived; nullptr as `archive`
  const int32_t* archive_heads;

  // [state_floats]
  H2O_HD float* state(int32_t sequence) const { return states + sequence * state_floats; }

  H2O_HD KvHead head(int32_t sequence, int32_t kv_head) const {
    return head(policies[sequence], sequence, kv_head);
  }

  // For callers that cannot read `policies`, which is in the back end's memory.
  H2O_HD KvHead head(const KvPolicy& policy, int32_t sequence, int32_t kv_head) const {
    const int64_t i = int64_t{sequence} * n_kv_heads + kv_head;
    return {policy,
            policy.slots(slots),
            k + i * slots * k_row_bytes,
            v + i * slots * v_row_bytes,
            positions + i * slots,
            policy.keeps_scores() ? scores + i * slots : nullptr,
            policy.weighs_values() ? value_norms + i * slots : nullptr,
            ranks != nullptr ? ranks + i * slots : nullptr,
            next_slot + i,
            first_head + kv_head};
  }

  H2O_HD KvStaging chunk(int32_t kv_head, int32_t row) const {
    const int64_t i = int64_t{kv_head} * max_rows + row;
    return {staged_k + i * k_row_bytes, staged_v + i * v_row_bytes, staged_scores + i,
            staged_value_norms + i};
  }
};

}  // namespace h2o
