// KvCache: the storage of the bounded KV cache, for every layer, sequence and kv_head.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/backend.h"
#include "kv/policy.h"
#include "kv/view.h"

namespace h2o {

// The types that keys and values can be stored in.
std::span<const DType> kv_dtypes();

struct KvShape {
  int32_t n_layers = 1;
  int32_t n_sequences = 1;
  int32_t n_heads = 0;
  int32_t n_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t max_tokens = 0;      // of a sequence; a policy whose budget is smaller never fills this
  int32_t max_rows = 1;        // of a batch
  DType k_dtype = DType::f16;  // one of kv_dtypes(), whose blocks divide head_dim
  DType v_dtype = DType::f16;
};

// A kept token.
struct KvEntry {
  int32_t position;
  float score;  // 0 when the policy keeps no scores
};

class KvCache {
 public:
  // Allocates everything. Throws InvalidArgument, OutOfMemory.
  KvCache(Backend& backend, const KvPolicy& policy, const KvShape& shape);

  KvView layer(int32_t layer) const;

  const KvShape& shape() const { return shape_; }
  const KvPolicy& policy() const { return view_.policy; }
  int32_t slots() const { return view_.slots; }

  // Tokens a sequence has seen, and how many of them it keeps (per layer and kv_head).
  int32_t length(int32_t sequence) const;
  int32_t kept(int32_t sequence) const;

  // How many more tokens a sequence can take; unbounded (INT32_MAX) once the policy evicts.
  int32_t room(int32_t sequence) const;

  // The batch has been through every layer: its rows are now part of their sequences.
  void advance(const Batch& batch);

  // Makes room for batches of up to `max_rows` rows.
  void reserve_rows(int32_t max_rows);

  // Forgets a sequence.
  void reset(int32_t sequence);

  // The kept tokens in position order.
  std::vector<KvEntry> entries(int32_t layer, int32_t sequence, int32_t kv_head) const;

  // Bytes that grow with the budget: K, V, positions, scores, next slots. Measured: the size of
  // what was allocated.
  size_t bytes() const { return storage_.size(); }

  // What bytes() would be for another policy. Throws as the constructor does.
  static size_t bytes(const KvPolicy& policy, const KvShape& shape);

 private:
  void check_sequence(int32_t sequence) const;

  Backend& backend_;
  KvShape shape_;
  KvView view_;                   // of layer 0
  Buffer storage_;                // every layer's slots
  Buffer scratch_;                // one chunk and the back end's workspace, shared by all layers
  std::vector<int32_t> lengths_;  // [n_sequences]
};

}  // namespace h2o
