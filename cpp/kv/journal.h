// KvJournal: what draft rows overwrite in the cache, so that they can be retracted.
//
// A draft is processed like every other token. Before that, the journal copies the scores and the
// slot that the token will overwrite, or the recurrent state, so that retracting the draft leaves
// no trace. It has the drafts of one batch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/batch.h"
#include "core/buffer.h"
#include "kv/view.h"

namespace h2o {

class Backend;

class KvJournal {
 public:
  // Allocates for up to `max_rows` drafts per batch in a cache of these layers, whose memory is the
  // host's.
  // Throws OutOfMemory.
  KvJournal(Backend& backend, std::span<const KvView> layers, int32_t max_rows);

  int32_t max_rows() const { return max_rows_; }
  size_t bytes() const { return storage_.size(); }

  // Forgets the drafts of the last batch. Those of the next are its rows from `first_row` on; if
  // that is negative, entries before theirs are kept.
  void begin(int32_t first_row) { first_row_ = first_row; }

  // Copies what a draft will overwrite in one kv_head of a layer, or its recurrent state.
  void record(const KvView& layer, const Segment& draft, int32_t kv_head) const;
  void record_state(const KvView& layer, const Segment& draft) const;

  // Copies all of it back.
  void restore(const KvView& layer, const Segment& draft) const;

 private:
  std::byte* entry(const KvView& layer, const Segment& draft, int32_t kv_head) const;
  std::byte* state(const KvView& layer, const Segment& draft) const;
  void restore(const KvView& layer, const Segment& draft, int32_t kv_head) const;

  struct Layer {
    int64_t offset;
    int64_t entry_bytes;  // of one kv_head
    int64_t states;       // offset
  };

  int32_t max_rows_;
  int32_t first_row_ = 0;
  std::vector<Layer> layers_;
  Buffer storage_;
};

}  // namespace h2o
