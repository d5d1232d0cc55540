// KvShape: the dimensions and types of a KvCache.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "kv/archive.h"

namespace h2o {

// The supported types for keys and values. An archive may also have keys in q3 and values in q2.
std::span<const DType> kv_dtypes();
std::span<const DType> archive_k_dtypes();
std::span<const DType> archive_v_dtypes();

// The KV heads of a layer.
struct KvHeads {
  int32_t n;
  int32_t dim;
};

struct KvShape {
  int32_t n_layers = 1;  // 0: there is nothing to keep
  int32_t n_sequences = 1;
  int32_t n_heads = 0;
  int32_t n_kv_heads = 0;  // the most that a layer has
  int32_t head_dim = 0;    // the largest
  // [n_layers] where layers differ; empty: each has n_kv_heads of head_dim
  std::vector<KvHeads> layer_heads = {};
  int32_t max_tokens = 0;      // per sequence; never reached by a policy with a smaller budget
  int32_t max_rows = 1;        // per batch
  DType k_dtype = DType::f16;  // one of kv_dtypes() whose block size divides head_dim
  DType v_dtype = DType::f16;
  // The values are the keys, with the same memory; both types are the same.
  bool shared_values = false;
  Rope rope = {};  // for rolling positions; RopeLayout::none: not supported
  // [n_layers, ...] as KvView::output_gram, in the back end's memory, not owned; nullptr if no
  // policy weighs values by outputs.
  const float* output_gram = nullptr;
  // [n_layers] the layer whose slots a layer reads: itself, or an earlier one with the same heads,
  // to whose scores it adds. Empty: each itself.
  std::vector<int32_t> sources = {};
  // [n_layers] floats of a sequence's recurrent state; 0, or empty: none
  std::vector<int64_t> state_floats = {};
  // [n_layers] does the layer attend, and so have slots? Empty: all do.
  std::vector<bool> attention_layers = {};
  ArchiveOptions archive = {};  // of evicted tokens; incompatible with rolling positions
  int32_t max_drafts = 0;       // rows of a batch that may be retracted
  bool borrows = false;         // keys, values and positions are another's: KvCache::borrow()

  // The layer whose slots a layer reads.
  int32_t source(int32_t layer) const { return sources.empty() ? layer : sources[layer]; }
  bool has_slots(int32_t layer) const { return attends(layer) && source(layer) == layer; }
  KvHeads heads(int32_t layer) const {
    return layer_heads.empty() ? KvHeads{n_kv_heads, head_dim} : layer_heads[layer];
  }
  bool attends(int32_t layer) const { return attention_layers.empty() || attention_layers[layer]; }
  bool may_roll() const { return rope.layout != RopeLayout::none; }
};

// Throws InvalidArgument, or OutOfMemory for more elements than any memory can hold.
void validate(const KvShape& shape);

}  // namespace h2o
