// KvCache: the storage of the bounded KV cache, for every layer, sequence and kv_head.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "kv/archive.h"
#include "kv/policy.h"
#include "kv/view.h"

namespace h2o {

// The types that keys and values can be stored in.
std::span<const DType> kv_dtypes();

// The one of them whose name in small letters it is. Throws InvalidArgument, which names the
// argument.
DType kv_dtype(std::string_view name, std::string_view argument = "kv_dtype");

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
  Rope rope = {};  // by which sequences may roll; no layout: none may
  // [n_layers, ...] as KvView has it, in the back end's memory, and the caller's; nullptr: no
  // policy weighs by outputs
  const float* output_gram = nullptr;
  ArchiveOptions archive = {};  // of what is evicted; none of sequences that may roll

  bool may_roll() const { return rope.layout != RopeLayout::none; }
};

// A kept token.
struct KvEntry {
  int32_t position;
  float score;  // attention received; 0 when the policy keeps no scores
};

class KvCache {
 public:
  // Allocates everything. `policies`: one, or one for each layer; they size the slots of every
  // sequence. Throws InvalidArgument, OutOfMemory.
  KvCache(Backend& backend, std::span<const KvPolicy> policies, const KvShape& shape);
  KvCache(Backend& backend, const KvPolicy& policy, const KvShape& shape)
      : KvCache(backend, {&policy, 1}, shape) {}

  Backend& backend() const { return backend_; }
  const KvView& layer(int32_t layer) const { return layers_[layer]; }
  const KvShape& shape() const { return shape_; }
  const KvPolicy& policy(int32_t layer, int32_t sequence) const {
    return policies_[layer * shape_.n_sequences + sequence];
  }

  // Tokens a sequence has seen, and how many of them a layer keeps (in each kv_head); without a
  // layer, the layer that keeps most.
  int32_t length(int32_t sequence) const;
  int32_t kept(int32_t layer, int32_t sequence) const;
  int32_t kept(int32_t sequence) const;

  // How many more tokens a sequence can take; unbounded (INT32_MAX) once every layer evicts and
  // nothing is archived.
  int32_t room(int32_t sequence) const;

  // The batch has been through every layer: its rows are now part of their sequences.
  void advance(const Batch& batch);

  // Its slots have been written from elsewhere: a sequence now has this many tokens.
  void set_length(int32_t sequence, int32_t length);

  // Makes room for `n_sequences` sequences; those that are there go on as before, in other memory.
  // Graphs captured before are invalid. Throws OutOfMemory, and has then changed nothing.
  void reserve_sequences(int32_t n_sequences);

  // Makes room for batches of up to `max_rows` rows. What was recorded before is then of no use.
  void reserve_rows(int32_t max_rows);

  // From now on the positions of a sequence are ranks among what it keeps: its keys are stored
  // unrotated and rotated when they are read, so that no position is ever larger than the cache
  // (h2o_semantics: rolling). Throws InvalidArgument unless the sequence can_roll().
  void roll(int32_t sequence);
  bool rolling(int32_t sequence) const;
  bool can_roll(int32_t sequence) const;

  // Forgets a sequence. It goes on with `policies` if there are any (one, or one for each layer).
  // Throws InvalidArgument, and has then changed nothing, if they need more slots than there are,
  // or scores that there are none of, or if sequences may roll and these do not evict.
  void reset(int32_t sequence, std::span<const KvPolicy> policies = {});

  // The kept tokens in position order.
  std::vector<KvEntry> entries(int32_t layer, int32_t sequence, int32_t kv_head) const;

  // Bytes that grow with the budget: K, V, and what is known of each slot; and what the back end
  // copies of an archive. Measured: the size of what was allocated.
  size_t bytes() const {
    return storage_.size() + (archive_ == nullptr ? 0 : archive_->device_bytes());
  }

  // Bytes of what has been evicted and is archived, in all sequences; nothing of bytes().
  const KvArchive* archive() const { return archive_.get(); }  // nullptr: there is none
  size_t archive_bytes() const { return archive_ == nullptr ? 0 : archive_->bytes(); }

  // What bytes() would be for other policies, without an archive. Throws as the constructor does.
  static size_t bytes(std::span<const KvPolicy> policies, const KvShape& shape);

 private:
  void check_sequence(int32_t sequence) const;
  void check_layer(int32_t layer) const;
  bool evicts(int32_t layer, int32_t sequence) const;
  void check_policies(std::span<const KvPolicy> policies) const;
  void set_policies(int32_t sequence, std::span<const KvPolicy> policies);
  Buffer allocate_rope_table(int64_t n_ranks) const;
  void copy(void* to, const void* from, int64_t n_bytes) const;

  Backend& backend_;
  KvShape shape_;
  std::vector<KvPolicy> sizing_;  // the policies that size the slots: one, or one for each layer
  std::vector<KvView> layers_;
  std::vector<KvPolicy> policies_;      // [n_layers, n_sequences]
  std::vector<int32_t> lengths_;        // [n_sequences]
  std::vector<char> rolling_;           // [n_sequences]
  std::unique_ptr<KvArchive> archive_;  // nullptr: what is evicted is gone
  Buffer storage_;                      // every layer's slots
  Buffer scratch_;     // one chunk and the back end's workspace, shared by all layers
  Buffer rope_table_;  // of every rank, if sequences may roll
};

}  // namespace h2o
