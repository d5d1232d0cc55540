// KvCache: the storage of the bounded KV cache for all layers, sequences and kv_heads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "kv/archive.h"
#include "kv/journal.h"
#include "kv/policy.h"
#include "kv/scratch.h"
#include "kv/shape.h"
#include "kv/view.h"

namespace h2o {

// A kept token.
struct KvEntry {
  int32_t position;
  float score;  // attention received; 0 when the policy keeps no scores
};

class KvCache {
 public:
  // Allocates everything. `policies`: one for all layers, or one per layer; they determine the
  // number of slots. Throws InvalidArgument, OutOfMemory.
  KvCache(Backend& backend, std::span<const KvPolicy> policies, const KvShape& shape);
  KvCache(Backend& backend, const KvPolicy& policy, const KvShape& shape)
      : KvCache(backend, {&policy, 1}, shape) {}

  Backend& backend() const { return backend_; }
  const KvView& layer(int32_t layer) const { return layers_[layer]; }
  const KvShape& shape() const { return shape_; }
  const KvPolicy& policy(int32_t layer, int32_t sequence) const {
    return policies_[layer * shape_.n_sequences + sequence];
  }

  // Tokens that a sequence has seen, and how many of them a layer keeps per kv_head; without a
  // layer: the maximum over all layers.
  int32_t length(int32_t sequence) const;
  int32_t kept(int32_t layer, int32_t sequence) const;
  int32_t kept(int32_t sequence) const;

  // How many more tokens a sequence can take; INT32_MAX minus its length if every layer evicts and
  // there is no archive.
  int32_t room(int32_t sequence) const;

  // Adds the rows of a batch to their sequences, after it has passed through every layer.
  void advance(const Batch& batch);

  // Removes the last `n` tokens of a sequence as if they had never been read. They must be drafts
  // from the last advance().
  void retract(const Batch& batch, int32_t sequence, int32_t n);

  // Removes drafts of several batches: the journal's entries [begin, end), which are the sequence's
  // last tokens.
  void retract_entries(int32_t sequence, int32_t begin, int32_t end);

  // Makes the first `length` tokens of another cache's sequence, which evicts nothing, the content
  // of sequence 0, without copying them; scores begin at zero. Rows that are read are stored there,
  // after these tokens. Requires shape().borrows, one sequence, scores in every layer, and host
  // memory.
  void borrow(const KvCache& owner, int32_t sequence, int32_t length);

  // The stored keys and values of tokens [begin, end) of a sequence that evicts nothing, and their
  // restoration.
  std::vector<std::byte> stored_rows(int32_t sequence, int32_t begin, int32_t end) const;
  void restore_rows(int32_t sequence, int32_t begin, int32_t end, std::span<const std::byte> rows);

  // Is needed for batches of several turns; nullptr unless shape().max_drafts > 0.
  KvJournal* journal() { return journal_ ? &*journal_ : nullptr; }

  // Sets the length of a sequence whose slots were written externally.
  void set_length(int32_t sequence, int32_t length);

  // Reallocates for `n_sequences` sequences and keeps the existing ones. Invalidates captured
  // graphs. Throws OutOfMemory without changing anything.
  void reserve_sequences(int32_t n_sequences);

  // Reallocates for batches of up to `max_rows` rows. Invalidates captured graphs.
  void reserve_rows(int32_t max_rows);

  // Switches a sequence to rolling positions: a token's position is its rank among the kept tokens;
  // keys are stored unrotated and rotated when read, so no position exceeds the cache size. Throws
  // InvalidArgument unless can_roll(sequence).
  void roll(int32_t sequence);
  bool rolling(int32_t sequence) const;
  bool can_roll(int32_t sequence) const;

  // Clears a sequence; if `policies` is not empty (one, or one per layer), they replace its
  // policies. Throws InvalidArgument, without changing anything, if they need more slots or other
  // arrays than were allocated, or if sequences may roll and the policies do not evict.
  void reset(int32_t sequence, std::span<const KvPolicy> policies = {});

  // Replaces the policies of a sequence whose slots will be written externally. The caller has
  // checked that they fit.
  void set_policies(int32_t sequence, std::span<const KvPolicy> policies);

  // Copies a sequence over another one, policies included. Requires a cache without an archive.
  void copy_sequence(int32_t from, int32_t to);

  // The kept tokens, sorted by position; none of a head that the layer lacks.
  std::vector<KvEntry> entries(int32_t layer, int32_t sequence, int32_t kv_head) const;

  // Returns for each token of a sequence whether any KV head of any layer keeps it: 1 or 0.
  std::vector<char> kept_anywhere(int32_t sequence) const;

  // Allocated bytes of all slots (K, V and per-slot data), of recurrent states, of the journal of
  // drafts and of the back end's copy of an archive's counts and bounds.
  size_t bytes() const {
    return storage_.size() + (journal_ ? journal_->bytes() : 0) +
           (archive_ == nullptr ? 0 : archive_->device_bytes());
  }

  // Bytes of archived tokens in all sequences; not part of bytes().
  const KvArchive* archive() const { return archive_.get(); }  // nullptr if there is none
  size_t archive_bytes() const { return archive_ == nullptr ? 0 : archive_->bytes(); }

  // bytes() for other policies, without an archive and drafts. Throws as the constructor does.
  static size_t bytes(std::span<const KvPolicy> policies, const KvShape& shape);

 private:
  void check_sequence(int32_t sequence) const;
  void check_layer(int32_t layer) const;
  // Does the layer take any number of tokens?
  bool unlimited(int32_t layer, int32_t sequence) const;
  void check_policies(std::span<const KvPolicy> policies) const;
  void note_questions(int32_t layer);
  void retract_entries(int32_t sequence);           // retracted_
  void truncate(int32_t sequence, int32_t length);  // of a cache that evicts nothing
  // Calls f(address, bytes) for the keys, then the values, of these tokens in each head.
  template <class F>
  void for_each_rows(int32_t sequence, int32_t begin, int32_t end, const F& f) const;
  void copy(void* to, const void* from, int64_t n_bytes) const;

  void grow(int32_t n_sequences);

  Backend& backend_;
  KvShape shape_;
  std::vector<KvPolicy> sizing_;  // determine the number of slots: one, or one per layer
  std::vector<KvView> layers_;
  std::vector<KvPolicy> policies_;      // [n_layers, n_sequences]
  std::vector<int32_t> lengths_;        // [n_sequences]
  std::vector<char> rolling_;           // [n_sequences]
  std::unique_ptr<KvArchive> archive_;  // nullptr: evicted tokens are discarded
  std::optional<KvJournal> journal_;
  std::vector<int32_t> retracted_;  // entries of the journal, the last first
  Buffer storage_;                  // every layer's slots
  KvScratch scratch_;               // shared by all layers
};

}  // namespace h2o
