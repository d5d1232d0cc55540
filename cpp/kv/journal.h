// KvJournal: what draft rows overwrite in the cache, so that they can be retracted.
//
// A draft is processed like every other token. Before that, the scores and the slot that the token
// will overwrite, or the recurrent state, are copied to the journal, so that retracting the draft
// leaves no trace. It has the drafts of one batch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/buffer.h"
#include "kv/view.h"

namespace h2o {

class Backend;

// Memory of the cache that a draft changes, and where an entry has what it was before.
struct KvChange {
  std::byte* memory;
  int64_t at;     // offset in the entry; a multiple of 4, except for values
  int64_t bytes;  // 0: the cache has no such memory
};

// The journal of one layer, passed by value. Shared by host and device code.
struct KvUndo {
  static constexpr int kChanges = 7;  // of a draft in one kv_head

  std::byte* entries;   // [max_rows, n_kv_heads, entry_bytes]
  int64_t entry_bytes;  // a multiple of 16
  float* states;        // [max_rows, state_floats]

  H2O_HD std::byte* entry(const KvView& layer, int32_t i, int32_t kv_head) const {
    return entries + (int64_t{i} * layer.n_kv_heads + kv_head) * entry_bytes;
  }
  H2O_HD float* state(const KvView& layer, int32_t i) const {
    return states + i * layer.state_floats;
  }

  // An entry begins with the slot of its draft; then whether the token that the draft evicts is
  // archived.
  H2O_HD static int32_t& slot(std::byte* entry) { return reinterpret_cast<int32_t*>(entry)[0]; }
  H2O_HD static int32_t& archives(std::byte* entry) { return reinterpret_cast<int32_t*>(entry)[1]; }
  static constexpr int64_t kPositionAt = 8;
  H2O_HD static int32_t position(const std::byte* entry) {
    return *reinterpret_cast<const int32_t*>(entry + kPositionAt);
  }

  // Did a draft, without which the sequence has `length` tokens, archive the token that it evicted?
  H2O_HD static bool archived(std::byte* entry, const KvHead& head, int32_t length) {
    return archives(entry) != 0 && head.evicts() && head.policy.kept(length) + 1 == head.slots;
  }

  // Change i < kChanges of a draft that is stored in `slot`.
  H2O_HD static KvChange change(const KvView& layer, const KvHead& head, int32_t slot, int i) {
    constexpr int64_t kNumber = sizeof(int32_t);
    const auto change_of = [](void* memory, int64_t at, int64_t bytes) {
      return KvChange{static_cast<std::byte*>(memory), at, memory == nullptr ? 0 : bytes};
    };
    const int64_t scores_at = kPositionAt + 2 * kNumber;
    const int64_t ranks_at = scores_at + (layer.scores != nullptr ? layer.slots * kNumber : 0);
    const int64_t k_at = ranks_at + (layer.ranks != nullptr ? layer.slots * kNumber : 0);
    switch (i) {
      case 0:
        return change_of(head.next_slot, 0, kNumber);
      case 1:
        return change_of(head.positions + slot, kPositionAt, kNumber);
      case 2:
        return change_of(head.value_norms != nullptr ? head.value_norms + slot : nullptr,
                         kPositionAt + kNumber, kNumber);
      case 3:
        return change_of(head.scores, scores_at, head.slots * kNumber);
      case 4:
        return change_of(head.ranks, ranks_at, head.slots * kNumber);
      case 5:
        return change_of(head.k + slot * layer.k_row_bytes, k_at, layer.k_row_bytes);
      default:
        return change_of(head.v + slot * layer.v_row_bytes, k_at + layer.k_row_bytes,
                         layer.v_row_bytes);
    }
  }
};

// Drafts of a sequence that are to be undone.
struct Retraction {
  int32_t sequence;
  int32_t length;                    // of the sequence, with them
  std::span<const int32_t> entries;  // of the journal; they are its last tokens, the last first
};

class KvJournal {
 public:
  // Allocates for up to `max_rows` drafts per batch in a cache of these layers. Throws OutOfMemory.
  KvJournal(Backend& backend, std::span<const KvView> layers, int32_t max_rows);

  int32_t max_rows() const { return max_rows_; }
  size_t bytes() const { return storage_.size(); }

  KvUndo layer(int32_t layer) const {
    const Layer& at = layers_[layer];
    return {storage_.data() + at.entries, at.entry_bytes,
            reinterpret_cast<float*>(storage_.data() + at.states)};
  }

 private:
  struct Layer {
    int64_t entries, entry_bytes, states;
  };

  int32_t max_rows_;
  std::vector<Layer> layers_;
  Buffer storage_;
};

}  // namespace h2o
