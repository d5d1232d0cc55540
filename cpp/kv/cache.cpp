#include "kv/cache.h"

#include <algorithm>
#include <array>
#include <limits>

#include "core/error.h"
#include "core/layout.h"

namespace h2o {
namespace {

// Where the slots of all layers lie in one buffer.
struct Storage {
  Storage(const KvPolicy& policy, const KvShape& shape) {
    const int64_t heads = int64_t{shape.n_layers} * shape.n_sequences * shape.n_kv_heads;
    const int64_t all_slots = heads * slots(policy, shape);
    Layout layout;
    k = layout.place(all_slots * byte_size(shape.k_dtype, shape.head_dim));
    v = layout.place(all_slots * byte_size(shape.v_dtype, shape.head_dim));
    positions = layout.place(all_slots * int64_t{sizeof(int32_t)});
    scores = layout.place(policy.keeps_scores() ? all_slots * int64_t{sizeof(float)} : 0);
    next_slot = layout.place(heads * int64_t{sizeof(int32_t)});
    size = layout.size();
  }

  // One slot more than the budget: the token being decoded is not counted (h2o_semantics: a decode
  // query sees H + R + 1 keys). Never more than the sequence can be long.
  static int32_t slots(const KvPolicy& policy, const KvShape& shape) {
    return static_cast<int32_t>(std::min<int64_t>(policy.budget() + 1, shape.max_tokens));
  }

  int64_t k, v, positions, scores, next_slot;  // offsets
  size_t size;
};

void validate_dtype(DType dtype, int32_t head_dim) {
  const std::span<const DType> dtypes = kv_dtypes();
  require(std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end(), "[kv cache] type ",
          info(dtype).name, " is not one of ", dtype_names(dtypes));
  require(head_dim % info(dtype).block_size == 0, "[kv cache] type ", info(dtype).name,
          " comes in blocks of ", info(dtype).block_size, ", which head_dim ", head_dim,
          " is no multiple of");
}

void validate(const KvShape& shape) {
  require(shape.n_layers > 0 && shape.n_sequences > 0 && shape.n_heads > 0 &&
              shape.n_kv_heads > 0 && shape.head_dim > 0,
          "[kv cache] layers ", shape.n_layers, ", sequences ", shape.n_sequences, ", heads ",
          shape.n_heads, ", kv_heads ", shape.n_kv_heads, ", head_dim ", shape.head_dim,
          ": all must be positive");
  require(shape.n_heads % shape.n_kv_heads == 0, "[kv cache] ", shape.n_heads,
          " heads cannot share ", shape.n_kv_heads, " kv_heads evenly");
  require(shape.max_tokens > 0, "[kv cache] max_tokens is ", shape.max_tokens,
          ", it must be positive");
  require(shape.max_rows > 0, "[kv cache] max_rows is ", shape.max_rows, ", it must be positive");
  validate_dtype(shape.k_dtype, shape.head_dim);
  validate_dtype(shape.v_dtype, shape.head_dim);
  // Above this byte counts could overflow: up to 16 bytes for each element, in a workspace for
  // each of up to 1024 threads. No machine has that much memory.
  const double elements = 1.0 * shape.n_layers * shape.n_sequences * shape.n_heads *
                          (1.0 * shape.max_tokens + shape.max_rows) * shape.head_dim;
  if (elements > 1e15) {
    throw OutOfMemory(text("[kv cache] ", elements, " elements do not fit in memory"));
  }
}

}  // namespace

std::span<const DType> kv_dtypes() {
  static constexpr std::array kTypes = {DType::f32, DType::f16, DType::bf16, DType::q8_0,
                                        DType::q4_0};
  return kTypes;
}

KvCache::KvCache(Backend& backend, const KvPolicy& policy, const KvShape& shape)
    : backend_(backend), shape_(shape) {
  validate(policy);
  validate(shape);
  lengths_.assign(shape.n_sequences, 0);

  view_ = {};
  view_.policy = policy;
  view_.k_dtype = shape.k_dtype;
  view_.v_dtype = shape.v_dtype;
  view_.n_heads = shape.n_heads;
  view_.n_kv_heads = shape.n_kv_heads;
  view_.head_dim = shape.head_dim;
  view_.slots = Storage::slots(policy, shape);
  view_.k_row_bytes = byte_size(shape.k_dtype, shape.head_dim);
  view_.v_row_bytes = byte_size(shape.v_dtype, shape.head_dim);

  const Storage at(policy, shape);
  storage_ = backend.allocate(at.size);
  view_.k = storage_.data() + at.k;
  view_.v = storage_.data() + at.v;
  view_.positions = reinterpret_cast<int32_t*>(storage_.data() + at.positions);
  view_.next_slot = reinterpret_cast<int32_t*>(storage_.data() + at.next_slot);
  if (policy.keeps_scores()) {
    view_.scores = reinterpret_cast<float*>(storage_.data() + at.scores);
  }

  reserve_rows(shape.max_rows);
}

void KvCache::reserve_rows(int32_t max_rows) {
  KvShape shape = shape_;
  KvView view = view_;  // the cache stays as it is should there be no memory
  shape.max_rows = max_rows;
  view.max_rows = max_rows;
  validate(shape);

  const int64_t rows = view.evicts() ? int64_t{shape.n_kv_heads} * max_rows : 0;
  Layout layout;
  const int64_t chunk_k = layout.place(rows * view.k_row_bytes);
  const int64_t chunk_v = layout.place(rows * view.v_row_bytes);
  const int64_t chunk_scores = layout.place(rows * int64_t{sizeof(float)});
  const int64_t workspace = layout.place(static_cast<int64_t>(backend_.attend_workspace(view)));
  scratch_ = backend_.allocate(layout.size());
  view.chunk_k = scratch_.data() + chunk_k;
  view.chunk_v = scratch_.data() + chunk_v;
  view.chunk_scores = reinterpret_cast<float*>(scratch_.data() + chunk_scores);
  view.workspace = scratch_.data() + workspace;
  shape_ = shape;
  view_ = view;
}

KvView KvCache::layer(int32_t layer) const {
  const int64_t heads = int64_t{layer} * shape_.n_sequences * shape_.n_kv_heads;
  const int64_t slots = heads * view_.slots;
  KvView view = view_;
  view.k += slots * view_.k_row_bytes;
  view.v += slots * view_.v_row_bytes;
  view.positions += slots;
  if (view.scores != nullptr) view.scores += slots;
  view.next_slot += heads;
  return view;
}

int32_t KvCache::length(int32_t sequence) const {
  check_sequence(sequence);
  return lengths_[sequence];
}

int32_t KvCache::kept(int32_t sequence) const {
  check_sequence(sequence);
  return static_cast<int32_t>(std::min<int64_t>(lengths_[sequence], policy().budget()));
}

int32_t KvCache::room(int32_t sequence) const {
  check_sequence(sequence);
  const int32_t limit = view_.evicts() ? std::numeric_limits<int32_t>::max() : view_.slots;
  return limit - lengths_[sequence];
}

void KvCache::advance(const Batch& batch) {
  for (const Segment& segment : batch.segments) {
    lengths_[segment.sequence] = segment.position + segment.n_rows;
  }
}

void KvCache::reset(int32_t sequence) {
  check_sequence(sequence);
  lengths_[sequence] = 0;
  const std::vector<int32_t> zeros(shape_.n_kv_heads, 0);
  for (int32_t l = 0; l < shape_.n_layers; ++l) {
    backend_.write(layer(l).head(sequence, 0).next_slot, zeros.data(),
                   zeros.size() * sizeof(int32_t));
  }
}

std::vector<KvEntry> KvCache::entries(int32_t layer, int32_t sequence, int32_t kv_head) const {
  check_sequence(sequence);
  require(layer >= 0 && layer < shape_.n_layers, "[kv cache] layer ", layer, ", the model has ",
          shape_.n_layers);
  require(kv_head >= 0 && kv_head < shape_.n_kv_heads, "[kv cache] kv_head ", kv_head,
          ", a layer has ", shape_.n_kv_heads);

  const KvHead head = this->layer(layer).head(sequence, kv_head);
  const int32_t written = std::min(lengths_[sequence], view_.slots);
  std::vector<int32_t> positions(written);
  std::vector<float> scores(written);
  int32_t next_slot = 0;
  backend_.read(positions.data(), head.positions, written * sizeof(int32_t));
  backend_.read(&next_slot, head.next_slot, sizeof(int32_t));
  if (head.scores != nullptr) backend_.read(scores.data(), head.scores, written * sizeof(float));

  std::vector<KvEntry> entries;
  entries.reserve(written);
  for (int32_t slot = 0; slot < written; ++slot) {
    if (slot != next_slot) entries.push_back({positions[slot], scores[slot]});
  }
  std::sort(entries.begin(), entries.end(),
            [](const KvEntry& a, const KvEntry& b) { return a.position < b.position; });
  return entries;
}

size_t KvCache::bytes(const KvPolicy& policy, const KvShape& shape) {
  h2o::validate(policy);
  validate(shape);
  return Storage(policy, shape).size;
}

void KvCache::check_sequence(int32_t sequence) const {
  require(sequence >= 0 && sequence < shape_.n_sequences, "[kv cache] sequence ", sequence,
          ", the cache has ", shape_.n_sequences);
}

}  // namespace h2o
